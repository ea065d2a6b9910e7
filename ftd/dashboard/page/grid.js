// Pipelines as a grid: a row for each, as wide as the model; a stage is as wide as its layers.

import { NODE_MARKS, NODE_WORDS, hue, layers, make, nodeOf, pipelineName, plural } from "./words.js";

const MOST_ROWS = 32;
const $ = (id) => document.getElementById(id);
let drawn = null;
let blocks = [];
let all = false;

export function drawGrid(store, view, parts) {
  const { state, nodes } = store.document;
  const pipelines = state.pipelines ?? [];
  if (drawn !== pipelines) {
    drawn = pipelines;
    build(store, view, pipelines);
  }
  for (const { block, mark, node, words } of blocks) {
    const known = nodes[node]?.state ?? "OFFLINE";
    if (block.dataset.state !== known) {
      block.dataset.state = known;
      mark.textContent = known === "HEALTHY" ? "" : NODE_MARKS[known] ?? "?";
      block.ariaLabel = block.title = `${words}, ${NODE_WORDS[known] ?? known}`;
    }
    const chosen = view.node === node;
    if ((block.dataset.chosen === "yes") !== chosen) block.dataset.chosen = chosen ? "yes" : "";
  }
}

function build(store, view, pipelines) {
  blocks = [];
  const box = $("grid");
  if (!pipelines.length) {
    box.replaceChildren(make("p", { class: "quiet" }, "no plan: nothing is being trained"));
    return;
  }
  const total = pipelines[0].stages.at(-1).end_layer;
  const short = pipelines.every((p) => p.stages.every((s) => s.devices.every((d) => d.endsWith("/0"))));
  const shown = all ? pipelines : pipelines.slice(0, MOST_ROWS);
  const rows = shown.map((pipeline, index) => row(pipeline, index, total, short, view));
  const layout = make("div", { class: "grid", "data-many": pipelines.length > 8 ? "yes" : "" }, axis(total), ...rows);
  const words = make("p", { class: "quiet" }, `${plural(pipelines.length, "pipeline")} of ${plural(total, "layer")}; each holds the whole model`);
  const more = pipelines.length > MOST_ROWS
    ? make("button", { type: "button", class: "older", onclick: () => { all = !all; drawn = null; drawGrid(store, view); } },
      all ? "fewer" : `all ${pipelines.length} pipelines`)
    : null;
  box.replaceChildren(words, layout, ...(more ? [more] : []));
}

function axis(total) {
  const marks = make("div", { class: "axis", "aria-hidden": "true" });
  const step = Math.max(1, Math.ceil(total / 12));
  for (let layer = 0; layer < total; layer += step) {
    const tick = make("span", {}, `${layer}`);
    tick.style.insetInlineStart = `${(100 * layer) / total}%`;
    marks.append(tick);
  }
  return make("div", { class: "row" }, make("span", { class: "name quiet" }, "layer"), marks, make("span", { class: "share quiet" }, "share"));
}

function row(pipeline, index, total, short, view) {
  const name = pipelineName(index);
  const track = make("div", { class: "track", role: "list", "aria-label": `pipeline ${name}` },
    ...pipeline.stages.map((stage) => stageBlock(stage, total, short, view)));
  return make("div", { class: "row" }, make("span", { class: "name" }, name), track,
    make("span", { class: "share", title: `${plural(pipeline.microbatches, "microbatch", "microbatches")} of a step` }, `× ${pipeline.microbatches}`));
}

function stageBlock(stage, total, short, view) {
  const node = nodeOf(stage.devices[0]);
  const range = layers(stage.first_layer, stage.end_layer);
  const devices = short ? node : `${node}/${stage.devices.map((d) => d.slice(d.lastIndexOf("/") + 1)).join(",")}`;
  const mark = make("b", { "aria-hidden": "true" });
  const block = make("button", { type: "button", class: "stage", role: "listitem", onclick: () => view.choose(node) },
    make("span", { class: "who" }, mark, devices), make("span", { class: "range" }, range));
  block.style.flexGrow = (stage.end_layer - stage.first_layer) / total;
  block.style.setProperty("--h", hue(node));
  blocks.push({ block, mark, node, words: `${devices}: layers ${range}` });
  return block;
}
