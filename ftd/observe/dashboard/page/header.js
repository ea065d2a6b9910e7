// The header (phase, job, connection, what is waited for) and the page's title: of now, or said to be of then.

import { PHASE_MARKS, age, clock, plural, say, show } from "./words.js";

const QUIET_S = 5;
const TALKING = new Set(["RUNNING", "QUIESCING", "RECOVERING"]);
const $ = (id) => document.getElementById(id);

/** What is known of the phase: that it is this now, or that it was and nobody has said anything since. */
function standing(store) {
  const phase = store.document.state.phase ?? "WAITING";
  const was = phase.toLowerCase();
  if (store.link === "lost") return { kind: "LOST", mark: "?", words: phase === "UNREACHABLE" ? was : `was ${was}`, note: "connection lost" };
  if (TALKING.has(phase) && store.quiet() > QUIET_S) {
    const words = `no news for ${age(store.quiet())}`;
    return { kind: "QUIET", mark: "?", words, note: words };
  }
  return { kind: phase, mark: PHASE_MARKS[phase] ?? "?", words: was, note: phase === "UNREACHABLE" ? "no coordinator leads" : "" };
}

export function drawHeader(store) {
  drawLink(store);
  const known = store.document;
  if (!known) return;
  const { state } = known;
  say($("cluster"), known.cluster);
  const job = state.job;
  const words = job
    ? `${job.name}: step ${state.step.toLocaleString("en")} of ${job.steps.toLocaleString("en")}`
    : "no job: submit one with ftd submit JOB.toml";
  say($("job-words"), words);
  const bar = $("job-bar");
  show(bar, !!job);
  bar.setAttribute("aria-valuenow", state.step ?? 0);
  bar.setAttribute("aria-valuemax", job?.steps ?? 1);
  bar.firstElementChild.style.transform = `scaleX(${share(state)})`;
  drawStanding(store);
  say($("footer"), `ftd ${state.version ?? ""} · generation ${state.generation ?? "–"}`
    + ` · ${plural(Object.keys(known.nodes).length, "node")}${state.leader ? ` · ${leads(state)}` : ""} · what the coordinator publishes, and nothing else`);
}

const share = ({ job, step }) => (job ? Math.min(1, step / Math.max(1, job.steps)) : 0);

/** Pill, title and banner: they change without news, too, and the title is what a hidden page shows. */
export function drawStanding(store) {
  const { state, cluster } = store.document;
  const { kind, mark, words, note } = standing(store);
  const badge = $("phase");
  // A clock that ticks is not read out; the banner says it once.
  badge.ariaLive = kind === "QUIET" ? "off" : "polite";
  say(badge, `${mark} ${words}`);
  badge.dataset.phase = kind;
  const title = `${mark} ${state.job ? `${state.job.name} ${Math.floor(share(state) * 100)} %` : cluster}${note ? `: ${note}` : ""}`;
  say(document.querySelector("title"), title);
  banner(store, state, kind);
  document.body.classList.toggle("stale", ["LOST", "QUIET", "UNREACHABLE"].includes(kind));
}

function leads({ leader, standbys, ineligible }) {
  const behind = standbys?.length ? `, ${standbys.join(", ")} standing by` : "";
  const beside = Object.keys(ineligible ?? {});
  return `${leader} leads${behind}${beside.length ? `, ${beside.join(", ")} not able to take over ▲` : ""}`;
}

function drawLink(store) {
  const link = $("link");
  link.dataset.link = store.link;
  say(link, { live: "● live", lost: "✖ connection lost", connecting: "◌ connecting" }[store.link]);
}

function banner(store, state, kind) {
  const element = $("banner");
  let text = "", grave = false;
  if (kind === "LOST") {
    text = `Connection to the coordinator lost at ${clock(store.lostAt)}: what stands here is as of then. Trying again…`
      + (state.standbys?.length ? ` ${state.standbys.join(", ")} stood by: look at that one's page.` : "");
    grave = true;
  } else if (kind === "QUIET") {
    text = `Nothing heard since ${clock(Date.now() / 1000 - store.quiet())}: is the broker away? What stands here is as of then.`;
    grave = true;
  } else if (kind === "UNREACHABLE") {
    text = `No coordinator leads: ${state.reason}. Training goes on by itself; what stands here is as of then.`;
    grave = true;
  } else if (kind === "PAUSED") {
    text = `Paused, training stands still: ${state.waiting_for || "something is missing"}.`;
    grave = true;
  } else if (kind === "FAILED") {
    text = `The job failed: ${state.outcome}`;
    grave = true;
  } else if (state.waiting_for) {
    text = `Waiting for ${state.waiting_for}.`;
  } else if (state.planning) {
    text = `Planning for other numbers of nodes: ${state.planning.done} of ${state.planning.total}.`;
  }
  show(element, !!text);
  element.classList.toggle("grave", grave);
  if (text) say(element, text);
}
