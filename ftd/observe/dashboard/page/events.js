// Events, newest first; each one opens to its story: all events of its chapter, with times relative to the first.

import { $, SEVERITIES, clock, duration, eventLook, make, moment, say, show } from "./words.js";

const PAGE = 60;
const MAX_IN_STORY = 200;
let shown = PAGE;
let open = null;
let first = null;
let last = null;
let filterKey = "";

export function setUpEvents(store, view) {
  const refilter = () => { shown = PAGE; drawEvents(store, view, new Set(["filter"])); };
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("filter-severity").addEventListener("change", refilter);
  $("filter-text").addEventListener("input", refilter);
  $("filter-node").addEventListener("click", () => view.choose(null));
  $("event-older").addEventListener("click", async () => {
    if (!(await more(store, view))) await store.loadOlder();
    shown += PAGE;
    drawEvents(store, view, new Set(["filter"]));
  });
  $("event-list").addEventListener("click", (event) => {
    const item = event.target.closest(".event");
    if (!item || event.target.closest(".story")) return;
    const number = Number(item.dataset.n);
    open = open === number ? null : number;
    drawEvents(store, view, new Set(["filter"]));
    document.querySelector(`.event[data-n="${number}"] > button`)?.focus();
  });
}

export function drawEvents(store, view, parts) {
  const events = store.document.events;
  const chosen = $("filter-node");
  show(chosen, !!view.node);
  if (view.node) say(chosen, `${view.node} ✕`);
  const wanted = filter(view);
  const key = `${wanted.key} ${shown} ${open}`;
  const only = parts.has("events") && !parts.has("all") && key === filterKey && open === null;
  if (only && prepend(events, wanted.keep)) return older(store, events, wanted.keep);
  filterKey = key;
  const found = [];
  for (let i = events.length - 1; i >= 0 && found.length < shown; i--) if (wanted.keep(events[i])) found.push(events[i]);
  first = events.at(-1)?.n ?? null;
  last = found.at(-1)?.n ?? null;
  $("event-list").replaceChildren(...(found.length ? found.map((e) => line(e, events)) : [make("li", { class: "quiet" }, "none")]));
  older(store, events, wanted.keep);
}

/** Adds new events at the top and removes as many at the bottom, so that the list does not grow by itself. */
function prepend(events, keep) {
  if (first === null) return false;
  const fresh = [];
  for (let i = events.length - 1; i >= 0 && events[i].n > first; i--) if (keep(events[i])) fresh.push(events[i]);
  first = events.at(-1)?.n ?? first;
  if (!fresh.length) return true;
  const list = $("event-list");
  list.querySelector(":scope > .quiet")?.remove();
  list.prepend(...fresh.slice(0, shown).map((e) => line(e, events)));
  while (list.childElementCount > shown) list.lastElementChild.remove();
  last = Number(list.lastElementChild?.dataset.n);
  return true;
}

function older(store, events, keep) {
  const more = last !== null && (events[0].n > store.document.oldest || events.some((e) => e.n < last && keep(e)));
  show($("event-older"), more);
}

async function more(store, view) {
  const { keep } = filter(view);
  return store.document.events.filter((e) => e.n < last && keep(e)).length >= PAGE;
}

function filter(view) {
  const least = SEVERITIES.indexOf($("filter-severity").value);
  const text = $("filter-text").value.trim().toLowerCase();
  const node = view.node;
  return {
    key: `${least} ${text} ${node}`,
    keep: (event) => (least <= 0 || SEVERITIES.indexOf(event.severity) >= least)
      && (!node || event.node === node || event.nodes.includes(node))
      && (!text || `${event.words} ${event.node ?? ""} ${event.text}`.toLowerCase().includes(text)),
  };
}

function line(event, events) {
  const [kind, mark] = eventLook(event);
  const opened = open === event.n;
  return make("li", { class: "event", "data-n": event.n, "data-kind": kind },
    make("button", { type: "button", "aria-expanded": opened ? "true" : "false" },
      make("time", { title: moment(event.at), datetime: new Date(event.at * 1000).toISOString() }, clock(event.at)),
      make("span", { class: "mark", "aria-label": event.severity }, mark),
      make("span", { class: "body" }, make("b", {}, event.words), event.node ? make("span", { class: "node" }, ` ${event.node}`) : null,
        event.text ? make("span", { class: "reason" }, ` ${event.text}`) : null)),
    opened ? story(event, events) : null);
}

function story(event, events) {
  const chapter = events.filter((e) => e.chapter === event.chapter).slice(-MAX_IN_STORY);
  const began = chapter[0].at;
  const rows = chapter.map((e) => {
    const [kind, mark] = eventLook(e);
    return make("li", { "data-kind": kind, "data-own": e.n === event.n ? "yes" : null },
      make("span", { class: "after" }, e === chapter[0] ? clock(e.at) : `+${duration(e.at - began)}`),
      make("span", { class: "mark", "aria-label": e.severity }, mark),
      make("span", {}, make("b", {}, e.words), e.node ? ` ${e.node}` : "", e.text ? ` ${e.text}` : ""));
  });
  const step = event.step != null ? `step ${event.step} · ` : "";
  return make("div", { class: "story" },
    make("p", { class: "quiet" }, `${step}generation ${event.generation ?? "–"} · cause ${event.chapter}`),
    make("ol", {}, ...rows));
}
