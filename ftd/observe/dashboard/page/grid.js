// Pipelines as a grid: one row each, as wide as the model; a stage is as wide as its share of the layers.
// A new plan updates existing rows, because most of a large cluster stays the same.

import { $, NODE_MARKS, NODE_WORDS, hue, layers, make, nodeOf, pipelineName, plural, say, show } from "./words.js";

const MAX_ROWS = 20;
const MANY = 8;
let drawn = null;
let frame = null;
const rows = [];
let all = false;
let short = true;
let prefix = 0;

export function drawGrid(store, view) {
  const { state, nodes } = store.document;
  const pipelines = state.pipelines ?? [];
  frame ??= build(store, view);
  if (drawn !== pipelines) {
    drawn = pipelines;
    lay(pipelines, view);
  }
  for (const row of rows) {
    for (const stage of row.stages) colour(stage, nodes[stage.node]?.state ?? "OFFLINE", view.node === stage.node);
  }
}

function build(store, view) {
  const words = make("p", { class: "quiet" });
  const axis = make("div", { class: "axis", "aria-hidden": "true" });
  const head = make("div", { class: "row" }, make("span", { class: "name quiet" }, "layer"), axis, make("span", { class: "share quiet" }, "share"));
  const grid = make("div", { class: "grid" }, head);
  const more = make("button", { type: "button", class: "older" });
  more.addEventListener("click", () => { all = !all; drawn = null; drawGrid(store, view); });
  $("grid").replaceChildren(words, grid, more);
  return { words, axis, grid, more, total: 0 };
}

function lay(pipelines, view) {
  const total = pipelines[0]?.stages.at(-1).end_layer ?? 0;
  short = pipelines.every((p) => p.stages.every((s) => s.devices.every((d) => d.endsWith("/0"))));
  prefix = pipelines.length > MANY ? common(pipelines.flatMap((p) => p.stages.map((s) => nodeOf(s.devices[0])))) : 0;
  say(frame.words, pipelines.length ? `${plural(pipelines.length, "pipeline")} of ${plural(total, "layer")}; each one holds the whole model`
    : "no plan: no job is being trained");
  show(frame.grid, pipelines.length > 0);
  frame.grid.dataset.many = pipelines.length > MANY ? "yes" : "";
  if (frame.total !== total) scale(total);
  const count = all ? pipelines.length : Math.min(pipelines.length, MAX_ROWS);
  while (rows.length > count) rows.pop().element.remove();
  while (rows.length < count) rows.push(newRow(rows.length));
  rows.forEach((row, index) => fill(row, pipelines[index], total, view));
  show(frame.more, pipelines.length > MAX_ROWS);
  say(frame.more, all ? "fewer" : `all ${pipelines.length} pipelines`);
}

/** Length of the prefix that all names share, without digits; narrow stages omit it. */
function common(names) {
  let count = 0;
  while (names.every((name) => name[count] !== undefined && name[count] === names[0][count])) count++;
  while (count > 0 && /[0-9]/.test(names[0][count - 1])) count--;
  return names.some((name) => name.length === count) ? 0 : count;
}

function scale(total) {
  frame.total = total;
  const step = Math.max(1, Math.ceil(total / 12));
  const ticks = [];
  for (let layer = 0; layer < total; layer += step) {
    const tick = make("span", {}, `${layer}`);
    tick.style.insetInlineStart = `${(100 * layer) / total}%`;
    ticks.push(tick);
  }
  frame.axis.replaceChildren(...ticks);
}

function newRow(index) {
  const name = pipelineName(index);
  const track = make("div", { class: "track", role: "group", "aria-label": `pipeline ${name}` });
  const share = make("span", { class: "share" });
  const element = make("div", { class: "row" }, make("span", { class: "name" }, name), track, share);
  frame.grid.append(element);
  return { element, track, share, stages: [] };
}

function fill(row, pipeline, total, view) {
  while (row.stages.length > pipeline.stages.length) row.stages.pop().block.remove();
  while (row.stages.length < pipeline.stages.length) row.stages.push(newStage(row.track, view));
  row.stages.forEach((stage, index) => {
    const { first_layer: first, end_layer: end, devices, within } = pipeline.stages[index];
    const node = nodeOf(devices[0]);
    const who = short ? node : `${node}/${devices.map((d) => d.slice(d.lastIndexOf("/") + 1)).join(",")}`;
    const range = layers(first, end);
    const divided = { shard: "sharded", tensor: "tensor-parallel" }[within];
    const words = `${who}: layers ${range}${divided ? `, ${devices.length} devices, ${divided}` : ""}`;
    if (stage.words === words && stage.prefix === prefix) return;
    stage.prefix = prefix;
    stage.node = node;
    stage.words = words;
    stage.state = null;
    say(stage.who, who.slice(prefix));
    say(stage.range, range);
    stage.block.style.flexGrow = (end - first) / total;
    stage.block.style.setProperty("--h", hue(node));
  });
  say(row.share, `× ${pipeline.microbatches}`);
  row.share.title = `${plural(pipeline.microbatches, "microbatch", "microbatches")} of a step`;
}

function newStage(track, view) {
  const mark = make("b", { "aria-hidden": "true" });
  const who = make("span"), range = make("span", { class: "range" });
  const stage = { mark, who, range, node: null, words: null, state: null, chosen: false };
  stage.block = make("button", { type: "button", class: "stage", onclick: () => view.choose(stage.node) },
    make("span", { class: "who" }, mark, who), range);
  track.append(stage.block);
  return stage;
}

function colour(stage, state, chosen) {
  if (stage.state !== state) {
    stage.state = state;
    stage.block.dataset.state = state;
    say(stage.mark, state === "HEALTHY" ? "" : NODE_MARKS[state] ?? "?");
    stage.block.ariaLabel = stage.block.title = `${stage.words}, ${NODE_WORDS[state] ?? state}`;
  }
  if (stage.chosen !== chosen) {
    stage.chosen = chosen;
    stage.block.dataset.chosen = chosen ? "yes" : "";
  }
}
