// Nodes: chips with names if there are few; else small squares, with named chips for the nodes in trouble.

import { $, NODE_MARKS, NODE_WORDS, byName, hue, layers, make, nodeOf, pipelineName, say, show } from "./words.js";

const MAX_CHIPS = 40;
const CROWD = 300;
const MAX_TROUBLED = 24;
const tiles = new Map();
let order = [];
let many = null;
let roles = new Map();
let rolesOf = null;

export function setUpNodes(store, view) {
  $("node-tiles").addEventListener("pointerover", (event) => {
    const square = event.target.closest(".square");
    const node = store.document?.nodes[square?.dataset.node];
    if (node) square.title = `${square.ariaLabel}, ${roleWords(square.dataset.node, node)}`;
  });
  $("node-tiles").addEventListener("click", (event) => {
    const node = event.target.closest("[data-node]")?.dataset.node;
    if (node) view.choose(node);
  });
}

export function drawNodes(store, view) {
  const { nodes, state } = store.document;
  if (rolesOf !== state.pipelines) {
    rolesOf = state.pipelines;
    roles = rolesIn(state.pipelines ?? []);
  }
  const names = Object.keys(nodes);
  const squares = names.length > MAX_CHIPS;
  if (squares !== many || names.length !== order.length || names.some((name) => !tiles.has(name))) build(names, squares);
  const counts = {};
  const troubled = [];
  for (const name of order) {
    const node = nodes[name];
    counts[node.state] = (counts[node.state] ?? 0) + 1;
    if (node.state === "OFFLINE" || node.state === "UNHEALTHY" || (node.draining && node.in_plan) || node.quarantine || node.speed < 1) troubled.push(name);
    update(name, node, view);
  }
  say($("node-counts"), names.length
    ? Object.keys(NODE_MARKS).filter((s) => counts[s]).map((s) => `${NODE_MARKS[s]} ${counts[s].toLocaleString("en")} ${NODE_WORDS[s]}`).join("   ")
    : "no node has joined yet");
  drawTroubled(troubled, nodes, view);
  drawOne(nodes, view);
}

function build(names, squares) {
  many = squares;
  order = [...names].sort(byName);
  tiles.clear();
  for (const name of order) {
    const mark = make("b", { "aria-hidden": "true" });
    const role = squares ? null : make("span", { class: "role" });
    const tile = squares
      ? make("button", { type: "button", class: "square", "data-node": name }, mark)
      : make("button", { type: "button", class: "chip", "data-node": name }, mark, make("span", { class: "who" }, name), role);
    tile.style.setProperty("--h", hue(name));
    tiles.set(name, { tile, mark, role, words: null });
  }
  const box = make("div", { class: squares ? "squares" : "chips", "data-crowd": squares && order.length > CROWD ? "yes" : null }, ...[...tiles.values()].map((t) => t.tile));
  const troubled = squares ? [make("div", { class: "chips", id: "troubled" })] : [];
  $("node-tiles").replaceChildren(...troubled, box);
}

function update(name, node, view) {
  const known = tiles.get(name);
  const chosen = view.node === name;
  const role = known.role ? roleWords(name, node) : "";  // A square shows its role in a tooltip.
  const words = `${node.state} ${role} ${chosen} ${node.in_plan}`;
  if (known.words === words) return;
  known.words = words;
  known.tile.dataset.state = node.state;
  known.tile.dataset.idle = node.in_plan ? "" : "yes";
  known.tile.dataset.chosen = chosen ? "yes" : "";
  const mark = NODE_MARKS[node.state] ?? "?";
  known.mark.textContent = known.role || node.state !== "HEALTHY" ? mark : "";
  if (known.role) known.role.textContent = role;
  known.tile.ariaLabel = `${name}: ${NODE_WORDS[node.state] ?? node.state}`;
  if (role) known.tile.title = `${name}: ${NODE_WORDS[node.state] ?? node.state}, ${role}`;
}

function drawTroubled(troubled, nodes, view) {
  const box = $("troubled");
  if (!box) return;
  const rows = troubled.slice(0, MAX_TROUBLED).map((name) => make("button",
    { type: "button", class: "chip", "data-node": name, "data-state": nodes[name].state, "data-chosen": view.node === name ? "yes" : "" },
    make("b", {}, NODE_MARKS[nodes[name].state]), make("span", { class: "who" }, name), make("span", { class: "role" }, roleWords(name, nodes[name]))));
  const rest = troubled.length - rows.length;
  box.replaceChildren(...rows, ...(rest > 0 ? [make("span", { class: "quiet" }, `and ${rest} more`)] : []));
}

/** Details of the selected node. */
function drawOne(nodes, view) {
  const box = $("node-one");
  const node = nodes[view.node];
  show(box, !!node);
  if (!node) return;
  const waits = node.drain_waits ? ` (no plan without it yet: ${node.drain_waits})` : "";
  const speed = node.speed < 1 ? `, at ${Math.round(100 * node.speed)} % of the usual speed` : "";
  say(box, `${view.node}: ${NODE_WORDS[node.state] ?? node.state}${speed} · ${roleWords(view.node, node)}${waits} · `
    + `${node.devices} ${node.devices === 1 ? "device" : "devices"} · ${node.host}`
    + (node.quarantine ? ` · set aside: ${node.quarantine.reason} · ${node.quarantine.readmit}` : ""));
}

function roleWords(name, node) {
  const waits = node.drain_waits && node.state !== "OFFLINE" ? ", waits to leave" : "";
  if (node.draining && !waits) return node.in_plan ? "draining" : "drained";
  if (node.state === "OFFLINE") return "offline";
  if (node.quarantine) return "set aside";
  if (node.state === "UNHEALTHY") return "restarting";
  const role = roles.get(name);
  if (!node.in_plan || !role) return `idle${waits}`;
  return `${role}${node.speed < 1 ? `, at ${Math.round(100 * node.speed)} %` : ""}${waits}`;
}

function rolesIn(pipelines) {
  const found = new Map();
  pipelines.forEach((pipeline, index) => {
    for (const stage of pipeline.stages) {
      const node = nodeOf(stage.devices[0]);
      const range = layers(stage.first_layer, stage.end_layer);
      const before = found.get(node);
      found.set(node, before ? `${before}, ${range}` : `${pipelineName(index)} ${range}`);
    }
  });
  return found;
}
