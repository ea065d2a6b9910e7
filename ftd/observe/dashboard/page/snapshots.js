// Snapshots: the newest one's buckets, their owners, and which losses they survive.

import { every } from "./figures.js";
import { $, NODE_MARKS, hue, layers, make, plural, size } from "./words.js";

const MAX_BUCKETS = 24;
const MAX_OWNERS = 12;
let drawn = "";

export function drawSnapshots(store) {
  const { state, snapshot_layout: layout, nodes } = store.document;
  const { snapshot, snapshot_policy: policy } = state;
  const owners = layout?.buckets?.flatMap((bucket) => bucket.owners.map((name) => nodes[name]?.state ?? "?")) ?? [];
  const key = JSON.stringify([snapshot, policy, layout?.step, layout?.missing, layout?.buckets?.length, owners, state.checkpoint]);
  if (key === drawn) return;
  drawn = key;
  const box = $("snapshot-details");
  if (!snapshot) {
    box.replaceChildren(make("p", { class: "quiet" }, policy
      ? `none yet; ${every(policy)}, protected by ${policy.protection}`
      : "this job takes none: while some device holds a replica of every layer, a failure undoes no step"),
    ...checkpointLine(state.checkpoint));
    return;
  }
  const lost = snapshot.owners - snapshot.present;
  const line = `step ${snapshot.step.toLocaleString("en")} · ${snapshot.protection} · ${size(snapshot.size_bytes)} on ${plural(snapshot.owners, "node")}`
    + (policy ? ` · ${every(policy)}` : "");
  box.replaceChildren(
    make("p", { class: "facts" }, line),
    make("p", lost ? { class: "warning" } : { class: "quiet" }, lost
      ? `▲ ${plural(lost, "node")} of ${snapshot.owners} lost its part: ${(layout?.missing ?? []).slice(0, 8).join(", ")}${lost > 8 ? " …" : ""}`
      : "● every owner still holds its part"),
    table(layout, nodes),
    ...checkpointLine(state.checkpoint));
}

function table(layout, nodes) {
  if (!layout?.buckets) return make("p", { class: "quiet" }, "its layers are no longer known");
  const missing = new Set(layout.missing);
  const rows = layout.buckets.slice(0, MAX_BUCKETS).map((bucket) => make("li", {},
    make("div", { class: "bucket" }, make("b", {}, `layers ${layers(bucket.first_layer, bucket.end_layer)}`),
      make("span", { class: "quiet" }, `survives ${bucket.tolerance}`)),
    make("div", { class: "owners" }, ...chosen(bucket.owners, missing).map((name) => owner(name, missing.has(name), nodes[name], bucket)),
      many(bucket) ? make("span", { class: "quiet" }, `and ${many(bucket)} more`) : null,
      bucket.replica_peer ? owner(bucket.replica_peer, false, nodes[bucket.replica_peer], { ...bucket, share: `a copy of ${bucket.owners[0]}'s part` }) : null),
    make("p", { class: "quiet holds" }, `each holds ${bucket.share}`)));
  const rest = layout.buckets.length - rows.length;
  return make("ol", { class: "buckets" }, ...rows, rest > 0 ? make("li", { class: "quiet" }, `and ${plural(rest, "more bucket")}`) : null);
}

/** The owners to show: those that lost their part come first. */
function chosen(owners, missing) {
  if (owners.length <= MAX_OWNERS) return owners;
  return [...owners].sort((a, b) => missing.has(b) - missing.has(a)).slice(0, MAX_OWNERS);
}

const many = (bucket) => bucket.more + Math.max(0, bucket.owners.length - MAX_OWNERS);

function owner(name, lost, node, bucket) {
  const mark = lost ? "✖" : node?.state === "OFFLINE" ? NODE_MARKS.OFFLINE : "■";
  const chip = make("span", { class: "owner", "data-lost": lost ? "yes" : "", title: `${name} holds ${bucket.share}${lost ? ": it is lost" : ""}` },
    make("b", { "aria-label": lost ? "lost" : "present" }, mark), name);
  chip.style.setProperty("--h", hue(name));
  return chip;
}

function checkpointLine(checkpoint) {
  if (!checkpoint) return [];
  const there = checkpoint.step == null ? "none yet" : `step ${checkpoint.step.toLocaleString("en")}, ${size(checkpoint.size_bytes)}`;
  const writing = checkpoint.writing_step == null ? "" : ` · writing step ${checkpoint.writing_step.toLocaleString("en")}`;
  return [make("p", { class: "quiet" }, `Persistent checkpoint: ${there}, in ${checkpoint.url}${writing}`)];
}
