// The key figures.

import { $, NODE_MARKS, age, duration, learningRate, make, number, percent, plural, rate, say, show, size } from "./words.js";

const AT = 1, PRODUCTIVE = 4, ELAPSED = 5, STEPS = 6, TOKENS = 7, RATE = 8;
const tiles = new Map();

/** Share of the time from the first step to now, or to the job's end, that went into steps which still count. */
export function goodput(points, until) {
  if (!points.length) return null;
  let productive = 0, elapsed = 0;
  for (const point of points) { productive += point[PRODUCTIVE]; elapsed += point[ELAPSED]; }
  // The time since the newest commit counts as lost once it is longer than a step.
  const last = points[points.length - 1];
  const open = until === null ? 0 : Math.max(0, until - last[AT] - last[ELAPSED]);
  return elapsed + open > 0 ? productive / (elapsed + open) : null;
}

export const over = (state) => ["FINISHED", "FAILED"].includes(state.phase) || (state.phase === "WAITING");

export function drawFigures(store) {
  const { state, nodes, trend, evaluations } = store.document;
  const all = Object.values(nodes);
  const healthy = all.filter((n) => n.state !== "OFFLINE" && n.state !== "UNHEALTHY").length;
  const aside = all.filter((n) => n.quarantine).length;
  tile("loss", "loss", number(state.loss), state.step ? `at step ${state.step.toLocaleString("en")}` : "no step yet");
  const evaluation = evaluations.at(-1);
  const metrics = Object.entries(evaluation?.metrics ?? {}).map(([name, value]) => `${name.replaceAll("_", " ")} ${number(value)}`);
  tile("held-out", "held-out loss", number(evaluation?.loss), evaluation ? [`after step ${evaluation.step.toLocaleString("en")}`, ...metrics].join(" · ") : "");
  show(tiles.get("held-out").box, !!evaluation);
  const last = trend[1].at(-1), tokens = tokensPerSecond(state, last);
  const a = state.step_s ? ` · ${duration(state.step_s)} a step` : "";
  tile("rate", "throughput", rate(tokens ?? state.samples_per_s), `${tokens ? "tokens" : "samples"}/s${a}`);
  tile("learning-rate", "learning rate", learningRate(last?.[RATE]), last ? `at step ${last[0].toLocaleString("en")}` : "");
  show(tiles.get("learning-rate").box, !!last?.[RATE]);
  const share = goodput(trend[1], over(state) ? null : store.now());
  tile("goodput", "goodput", percent(share), "time spent on lasting steps");
  tile("nodes", "nodes", `${healthy.toLocaleString("en")}`,
    (healthy === all.length ? "all healthy" : `of ${all.length.toLocaleString("en")} healthy ${NODE_MARKS.UNHEALTHY}`)
      + (aside ? `, ${aside.toLocaleString("en")} set aside` : ""),
    healthy < all.length || aside ? "warning" : "");
  snapshotTile(store, state);
  const checkpoint = state.checkpoint;
  tile("checkpoint", "checkpoint", checkpoint?.step != null ? `step ${checkpoint.step.toLocaleString("en")}` : checkpoint ? "none yet" : "off",
    checkpoint?.writing_step != null ? `writing step ${checkpoint.writing_step}` : checkpoint?.step != null ? size(checkpoint.size_bytes) : "on a disk");
}

/** Tokens per second of the newest step; null if the loss has no tokens or nothing is being computed. */
function tokensPerSecond(state, point) {
  return state.step_s && point?.[TOKENS] ? point[TOKENS] / point[STEPS] / state.step_s : null;
}

function snapshotTile(store, state) {
  const { snapshot, snapshot_policy: policy } = state;
  if (!snapshot) {
    tile("snapshot", "snapshot age", policy ? "none yet" : "off", policy ? every(policy) : "in the nodes' memory");
    return;
  }
  const gone = snapshot.owners - snapshot.present;
  tile("snapshot", "snapshot age", age(store.now() - Date.parse(snapshot.at) / 1000),
    `step ${snapshot.step.toLocaleString("en")}${gone ? ` · ${plural(gone, "part")} lost ▲` : ` · ${size(snapshot.size_bytes)}`}`,
    gone ? "warning" : "");
}

export function every(policy) {
  if (!policy) return "";
  if (!policy.every_steps) return "none for now";
  const often = policy.every_steps === 1 ? "every step" : `every ${policy.every_steps.toLocaleString("en")} steps`;
  return policy.auto_interval ? `${often}, chosen` : often;
}

/** Updates what changes with time alone. */
export function tick(store) {
  snapshotTile(store, store.document.state);
}

function tile(key, label, value, note, mood = "") {
  let parts = tiles.get(key);
  if (!parts) {
    const shown = make("dd", { class: "value" }), small = make("dd", { class: "note" });
    const box = make("div", { class: "figure", "data-figure": key }, make("dt", {}, label), shown, small);
    $("figures").append(box);
    parts = { box, shown, small };
    tiles.set(key, parts);
  }
  say(parts.shown, value);
  say(parts.small, note);
  if (parts.box.dataset.mood !== mood) parts.box.dataset.mood = mood;
}
