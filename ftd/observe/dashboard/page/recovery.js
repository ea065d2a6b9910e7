// The recovery in progress with its phases, times and reasons; and the completed ones.

import { $, clock, duration, make, moment, plural, say, show, size } from "./words.js";

const PHASES = ["detect", "wait", "quiesce", "plan", "state", "resume"];
const MEANINGS = {
  detect: "from the fault until it was detected", wait: "while training was paused", quiesce: "until every survivor had stopped and reported",
  plan: "until the plan was chosen", state: "until all ranks had met and held their layers",
  resume: "until the next step was committed",
};
const NOTICED = {
  last_will: "the broker lost its connection", silence: "no heartbeat", no_answer: "it did not answer",
  goodbye: "it left", exited: "its process ended", raised: "its code raised an exception",
  hung: "it made no progress", prepared: "it is ready", request: "it was requested", measured: "it was measured",
  peer: "a peer's report",
};
const BEGINS = { fault: "from the fault", estimate: "from the last sign of life", detection: "from the detection" };
const MAX_SHOWN = 20;
let live = null;
let listed = "";

export function drawRecovery(store, view, parts) {
  const { recovery, recoveries } = store.document;
  if (parts.has("all") || parts.has("recovery") || parts.has("recoveries")) {
    live = null;
    const box = $("recovery-now");
    $("recovery").dataset.running = recovery ? "yes" : "";
    if (recovery) box.replaceChildren(running(store, recovery));
    else if (recoveries.length) box.replaceChildren(completed(recoveries.at(-1), true));
    else box.replaceChildren(make("p", { class: "quiet" }, "none so far"));
    say($("recovery-title"), recovery?.start ? "The first plan" : recovery ? "Recovery in progress" : recoveries.length ? "The last recovery" : "Recovery");
    drawPast(recoveries.slice(0, recovery ? undefined : -1));
  }
}

/** Completed recoveries are drawn when the user opens the list. */
export function setUpRecovery(store) {
  $("recovery-past").addEventListener("toggle", () => drawRecovery(store, null, new Set(["all"])));
}

/** Updates the time of the current phase. */
export function tickRecovery(store) {
  if (!live) return;
  const now = store.now();
  say(live.total, duration(now - live.began));
  if (live.phase) say(live.phase, duration(now - live.phaseBegan));
}

function running(store, recovery) {
  const seen = new Map(recovery.phases.map(([name, began, ended]) => [name, { began, ended }]));
  const began = recovery.phases[0][1];
  const total = make("strong", { class: "clock" }, duration(store.now() - began));
  live = { total, began, phase: null, phaseBegan: 0 };
  const steps = PHASES.filter((name) => seen.has(name) || (name !== "wait" && !(name === "detect" && recovery.start))).map((name) => {
    const phase = seen.get(name);
    const state = !phase ? (name === "detect" ? "unknown" : "ahead") : phase.ended === null ? "now" : "done";
    const time = make("span", { class: "time" }, phase?.ended != null ? duration(phase.ended - phase.began)
      : state === "now" ? duration(store.now() - phase.began) : state === "unknown" ? "?" : "");
    if (state === "now") live = { ...live, phase: time, phaseBegan: phase.began };
    const mark = { done: "✔", now: "▶", ahead: "○", unknown: "–" }[state];
    return make("li", { "data-phase": state, title: MEANINGS[name], "aria-current": state === "now" ? "step" : null },
      make("span", { class: "name" }, `${mark} ${name}`), time);
  });
  const attempts = recovery.attempts > 1 ? ` · generation ${recovery.generation}, ${plural(recovery.attempts, "attempt")}` : ` · generation ${recovery.generation}`;
  return make("div", { class: "running" },
    make("p", { class: "what" }, total, ` since ${clock(began)}${attempts}`),
    make("ol", { class: "phases" }, ...steps),
    reasons([
      ["lost", lossWords(recovery.losses)],
      ...errors(recovery.losses),
      ["reason", recovery.reason],
      ["step", recovery.decision],
      ["plan", recovery.plan],
      ["paused", recovery.paused],
    ]));
}

/** Groups losses that were noticed in the same way: node-1, node-2: the broker lost its connection. */
function lossWords(losses) {
  const alike = new Map();
  for (const loss of losses) {
    const how = NOTICED[loss.how] ?? loss.how ?? "";
    const who = loss.event === "TrainerLost" ? `a trainer of ${loss.node}` : loss.node;
    alike.set(how, [...(alike.get(how) ?? []), who]);
  }
  return [...alike].map(([how, who]) => `${few(who)}${how ? `: ${how}` : ""}`).join("; ");
}

/** Rows with the errors of trainers, each once, and where the full output of what was lost is. */
function errors(losses) {
  const found = new Set(losses.filter((loss) => loss.error).map((loss) => `${loss.node}: ${loss.error}`));
  const logs = new Set(losses.map((loss) => loss.log).filter(Boolean));
  return [["error", [...found].slice(0, 5).join("; ")], ["full output", [...logs].slice(0, 3).join("; ")]];
}

const few = (names) => (names.length > 6 ? `${names.slice(0, 5).join(", ")} and ${names.length - 5} more` : names.join(", "));

function title(recovery) {
  const names = recovery.nodes;
  const who = names.length > 3 ? `${names.slice(0, 2).join(", ")} and ${names.length - 2} more` : names.join(", ");
  return `${who || "the cluster"} ${recovery.change}`;
}

function bar(recovery) {
  const parts = recovery.phases;
  const total = parts.reduce((sum, [, ms]) => sum + ms, 0) || 1;
  const words = parts.map(([name, ms]) => `${name} ${duration(ms / 1000)}`).join(", ");
  return make("div", { class: "split", role: "img", "aria-label": words },
    ...parts.map(([name, ms]) => {
      const part = make("span", { "data-part": name, title: `${name}: ${duration(ms / 1000)}, ${MEANINGS[name]}` });
      part.style.flexGrow = Math.max(ms / total, 0.004);
      return part;
    }));
}

function keys(recovery) {
  return make("ul", { class: "keys" }, ...recovery.phases.map(([name, ms]) =>
    make("li", { "data-part": name, title: MEANINGS[name] }, make("i", {}), `${name} `, make("b", {}, duration(ms / 1000)))));
}

function completed(recovery, full) {
  const facts = [`${duration(recovery.total_ms / 1000)} ${BEGINS[recovery.measured_from] ?? ""} to the next step`,
    `${size(recovery.bytes_moved)} moved`,
    recovery.rolled_back_steps ? `${plural(recovery.rolled_back_steps, "step")} undone` : "no step undone",
    recovery.recomputed_steps ? `${plural(recovery.recomputed_steps, "step")} computed again` : null];
  return make("div", { class: "over", "data-failure": recovery.failure ? "yes" : "" },
    make("p", { class: "what" }, make("strong", {}, `${recovery.failure ? "✖" : "✚"} ${title(recovery)}`),
      make("span", { class: "quiet" }, ` ${clock(recovery.at)} · step ${(recovery.step + recovery.rolled_back_steps).toLocaleString("en")}`)),
    make("p", { class: "facts" }, facts.filter(Boolean).join(" · ")),
    bar(recovery), keys(recovery),
    full ? reasons([["noticed", noticed(recovery)], ...errors(recovery.losses ?? []), ["step", recovery.decision], ["plan", recovery.reason]]) : null);
}

function noticed(recovery) {
  if (recovery.losses?.length) return lossWords(recovery.losses);
  return NOTICED[recovery.detected_how] ?? recovery.detected_how;
}

function reasons(rows) {
  const given = rows.filter((row) => row && row[1]);
  return make("dl", { class: "reasons" }, ...given.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
}

function drawPast(recoveries) {
  const rows = recoveries.slice(-MAX_SHOWN).reverse();
  const box = $("recovery-past");
  const key = box.open ? rows.map((row) => row.n).join() : "closed";
  show(box, rows.length > 0);
  say(box.querySelector("summary"), `${plural(recoveries.length, "earlier one")}`);
  if (key === listed) return;
  listed = key;
  if (!box.open) return $("recovery-list").replaceChildren();
  $("recovery-list").replaceChildren(...rows.map((row) => make("li", { title: moment(row.at) }, completed(row, true))));
}
