// The page: at most one render per frame, and only of the panels whose data changed.

import { drawEvents, setUpEvents } from "./events.js";
import { drawFigures, tick } from "./figures.js";
import { drawHeader, drawStatus } from "./header.js";
import { drawSnapshots } from "./snapshots.js";
import { drawNodes, setUpNodes } from "./nodes.js";
import { drawGrid } from "./grid.js";
import { drawRecovery, setUpRecovery, tickRecovery } from "./recovery.js";
import { Store } from "./store.js";
import { drawTrends, setUpTrends, themeChanged } from "./trends.js";
import { $ } from "./words.js";

const PANELS = [
  [["state", "nodes", "trend", "link"], drawHeader],
  [["state", "nodes", "trend", "evaluations"], drawFigures],
  [["recovery", "recoveries", "state"], drawRecovery],
  [["pipelines", "nodes"], drawGrid],
  [["nodes", "pipelines"], drawNodes],
  [["snapshot_layout", "state", "nodes"], drawSnapshots],
  [["events"], drawEvents],
  [["trend", "marks", "evaluations"], drawTrends],
];
const view = { node: null };
let dirty = new Set();
let asked = false;

function changed(parts) {
  for (const part of parts) dirty.add(part);
  if (asked) return;
  asked = true;
  // A hidden page draws nothing; it is drawn as a whole when it becomes visible.
  requestAnimationFrame(render);
}

function render() {
  asked = false;
  const parts = dirty;
  dirty = new Set();
  if (!store.document) return drawHeader(store);
  performance.mark("ftd-render");
  for (const [wants, draw] of PANELS) {
    if (parts.has("all") || wants.some((part) => parts.has(part))) draw(store, view, parts);
  }
  performance.measure("ftd-update", "ftd-render");
}

/** Selects a node or none: its stages are highlighted and only its events are listed. */
view.choose = (node) => {
  view.node = view.node === node ? null : node;
  changed(["nodes", "pipelines", "events"]);
};

export const store = new Store(changed);
setUpTheme();
setUpEvents(store, view);
setUpNodes(store, view);
setUpRecovery(store);
setUpTrends(store);
store.load();
setInterval(() => store.document && drawStatus(store), 1000);
setInterval(() => store.document && !document.hidden && tick(store), 1000);
setInterval(() => store.document && !document.hidden && tickRecovery(store), 250);

function setUpTheme() {
  const button = $("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const dark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const label = () => {
    button.textContent = dark() ? "☀" : "☾";
    button.title = button.ariaLabel = dark() ? "Light colours" : "Dark colours";
  };
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("ftd-theme", root.dataset.theme); } catch { /* stays for this page only */ }
    label();
    themeChanged();
  });
  system.addEventListener("change", () => { label(); themeChanged(); });
  label();
}
