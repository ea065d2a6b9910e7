// Texts, number formats and small helpers that all panels share.

export const NODE_MARKS = { HEALTHY: "●", SNAP: "◍", COMPLETED: "◉", UNHEALTHY: "▲", OFFLINE: "✖" };
export const NODE_WORDS = {
  HEALTHY: "healthy", SNAP: "taking a snapshot", COMPLETED: "has finished",
  UNHEALTHY: "a trainer failed", OFFLINE: "offline",
};
export const PHASE_MARKS = {
  WAITING: "◌", RUNNING: "▶", QUIESCING: "◐", RECOVERING: "◑", PAUSED: "▮▮", FINISHED: "✔", FAILED: "✖",
  UNREACHABLE: "?",
};
export const SEVERITIES = ["info", "warning", "error", "critical"];
export const SEVERITY_MARKS = { info: "·", warning: "▲", error: "◆", critical: "⬢" };
const GOOD = new Set(["RecoveryCompleted", "JobFinished", "NodeRecovered", "NodeReadmitted", "NodeJoined", "BrokerRestored", "LeaderElected",
  "StragglerRecovered", "TrainingResumed", "ShardRepaired", "SnapshotCompleted", "CheckpointCompleted",
  "CheckpointExported"]);
const BAD = new Set(["NodeLost", "TrainerLost", "NodeFenced", "NodeQuarantined"]);

/** Kind of an event, for its colour, and the mark that says the same without colour. */
export function eventLook(event) {
  if (event.event === "ChaosInjected") return ["warning", "↯"];
  if (BAD.has(event.event)) return ["error", "✖"];
  if (event.severity !== "info") return [event.severity, SEVERITY_MARKS[event.severity] ?? "▲"];
  return GOOD.has(event.event) ? ["good", "✔"] : ["info", "·"];
}

export function plural(count, noun, nouns = `${noun}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? noun : nouns}`;
}

const two = (n) => String(n).padStart(2, "0");

/** 98 ms, 1.24 s, 12.4 s, 2:05, 3:04:05, 3 d 4 h. */
export function duration(seconds) {
  if (seconds == null || !isFinite(seconds)) return "–";
  if (seconds < 0.9995) return `${Math.max(0, Math.round(seconds * 1000))} ms`;
  if (seconds < 59.95) return seconds < 9.995 ? `${seconds.toFixed(2)} s` : `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

/** An age in whole seconds, because it is updated every second. */
export function age(seconds) {
  if (seconds == null || !isFinite(seconds)) return "–";
  return seconds < 60 ? `${Math.max(0, Math.floor(seconds))} s` : duration(seconds);
}

export function size(bytes) {
  let value = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    // The limits are where the rounded numbers reach the next form.
    if (value < 1023.5) return `${unit === "B" || value >= 99.95 ? value.toFixed(0) : value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

/** A loss or a metric: 1.2e+12, 12,345, 2.5000, 4e-5. */
export function number(value) {
  if (value == null || !isFinite(value)) return "–";
  if (Math.abs(value) >= 1e9) return shortExponent(value);
  if (Math.abs(value) >= 10000) return Math.round(value).toLocaleString("en");
  return value && Math.abs(value) < 1e-3 ? shortExponent(value) : value.toFixed(4);
}

/** A rate per second: 0.52, 7.3, 320, 51,200. */
export function rate(value) {
  if (value == null || !isFinite(value)) return "–";
  return value >= 10 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(2)));
}

export function learningRate(value) {
  if (!value) return "–";
  return value < 1e-3 ? shortExponent(value) : String(Number(value.toPrecision(3)));
}

/** Three digits and a power of ten: 4e-5, -1.23e+30. */
function shortExponent(value) {
  const [digits, power] = value.toExponential(2).split("e");
  return `${Number(digits)}e${power}`;
}

export function percent(share) {
  if (share == null || !isFinite(share)) return "–";
  return `${(100 * share).toFixed(share >= 0.9995 || share < 0.1 ? 0 : 1)} %`;
}

export function clock(seconds) {
  const at = new Date(seconds * 1000);
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

export function moment(seconds) {
  const at = new Date(seconds * 1000);
  return `${at.toLocaleDateString()} ${clock(seconds)}.${String(at.getMilliseconds()).padStart(3, "0")}`;
}

/** The half-open range with both ends included: 0–3. */
export function layers(first, end) {
  return end - first === 1 ? `${first}` : `${first}–${end - 1}`;
}

export function pipelineName(index) {
  const letter = String.fromCharCode(65 + (index % 26));
  return index < 26 ? letter : `${letter}${Math.floor(index / 26)}`;
}

const collator = new Intl.Collator("en", { numeric: true });
export const byName = (a, b) => collator.compare(a, b);

export const $ = (id) => document.getElementById(id);

/** Creates an element with attributes and children; text is never parsed as HTML. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value == null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children) if (child != null) element.append(child);
  return element;
}

/** Sets the text only if it changed, to avoid a layout. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function show(element, visible) {
  if (element.hidden === visible) element.hidden = !visible;
}

/** A stable hue for each node, far from those of the nodes before and after it. */
const hues = new Map();
export function hue(node) {
  if (!hues.has(node)) hues.set(node, Math.round((hues.size * 137.508 + 235) % 360));
  return hues.get(node);
}

export const nodeOf = (device) => device.slice(0, device.lastIndexOf("/"));
