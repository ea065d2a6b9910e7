// Snapshots: the newest one's buckets, who keeps them with what, and what that withstands.

import { every } from "./figures.js";
import { NODE_MARKS, hue, layers, make, plural, size } from "./words.js";

const MOST_BUCKETS = 24;
const MOST_OWNERS = 12;
const $ = (id) => document.getElementById(id);
let drawn = "";

export function drawKept(store, view) {
  const { state, where, nodes } = store.document;
  const { snapshot, snapshot_policy: policy } = state;
  const owners = where?.buckets?.flatMap((bucket) => bucket.owners.map((name) => nodes[name]?.state ?? "?")) ?? [];
  const key = JSON.stringify([snapshot, policy, where?.step, where?.missing, where?.buckets?.length, owners, state.checkpoint]);
  if (key === drawn) return;
  drawn = key;
  const box = $("kept");
  if (!snapshot) {
    box.replaceChildren(make("p", { class: "quiet" }, policy
      ? `none yet; ${every(policy)}, protected by ${policy.protection}`
      : "this job takes none: while a copy of every layer lives on some device, a failure undoes no step"),
    ...checkpointLine(state.checkpoint));
    return;
  }
  const gone = snapshot.owners - snapshot.present;
  const line = `step ${snapshot.step.toLocaleString("en")} · ${snapshot.protection} · ${size(snapshot.size_bytes)} on ${plural(snapshot.owners, "node")}`
    + (policy ? ` · ${every(policy)}` : "");
  box.replaceChildren(
    make("p", { class: "facts" }, line),
    make("p", gone ? { class: "warning" } : { class: "quiet" }, gone
      ? `▲ ${plural(gone, "node")} of ${snapshot.owners} lost its part: ${(where?.missing ?? []).slice(0, 8).join(", ")}${gone > 8 ? " …" : ""}`
      : "● every node that kept a part of it still has it"),
    table(where, nodes),
    ...checkpointLine(state.checkpoint));
}

function table(where, nodes) {
  if (!where?.buckets) return make("p", { class: "quiet" }, "its layout is not known any more");
  const missing = new Set(where.missing);
  const rows = where.buckets.slice(0, MOST_BUCKETS).map((bucket) => make("li", {},
    make("div", { class: "bucket" }, make("b", {}, `layers ${layers(bucket.first_layer, bucket.end_layer)}`),
      make("span", { class: "quiet" }, `withstands ${bucket.withstands}`)),
    make("div", { class: "owners" }, ...chosen(bucket.owners, missing).map((name) => owner(name, missing.has(name), nodes[name], bucket)),
      many(bucket) ? make("span", { class: "quiet" }, `and ${many(bucket)} more`) : null,
      bucket.buddy ? owner(bucket.buddy, false, nodes[bucket.buddy], { ...bucket, keeps: `a copy of ${bucket.owners[0]}'s part` }) : null),
    make("p", { class: "quiet keeps" }, `each keeps ${bucket.keeps}`)));
  const rest = where.buckets.length - rows.length;
  return make("ol", { class: "buckets" }, ...rows, rest > 0 ? make("li", { class: "quiet" }, `and ${plural(rest, "more bucket")}`) : null);
}

/** The first few, and before them those whose part is gone. */
function chosen(owners, missing) {
  if (owners.length <= MOST_OWNERS) return owners;
  return [...owners].sort((a, b) => missing.has(b) - missing.has(a)).slice(0, MOST_OWNERS);
}

const many = (bucket) => bucket.more + Math.max(0, bucket.owners.length - MOST_OWNERS);

function owner(name, gone, node, bucket) {
  const mark = gone ? "✖" : node?.state === "OFFLINE" ? NODE_MARKS.OFFLINE : "■";
  const chip = make("span", { class: "owner", "data-gone": gone ? "yes" : "", title: `${name} keeps ${bucket.keeps}${gone ? ": it is gone" : ""}` },
    make("b", { "aria-label": gone ? "gone" : "there" }, mark), name);
  chip.style.setProperty("--h", hue(name));
  return chip;
}

function checkpointLine(checkpoint) {
  if (!checkpoint) return [];
  const there = checkpoint.step == null ? "none yet" : `step ${checkpoint.step.toLocaleString("en")}, ${size(checkpoint.size_bytes)}`;
  const writing = checkpoint.writing_step == null ? "" : ` · writing step ${checkpoint.writing_step.toLocaleString("en")}`;
  return [make("p", { class: "quiet" }, `Persistent checkpoint: ${there}, in ${checkpoint.url}${writing}`)];
}
