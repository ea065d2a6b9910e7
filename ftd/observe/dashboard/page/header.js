// The header (phase, job, connection, what the cluster waits for) and the page's title; both say if the data is old.

import { $, PHASE_MARKS, age, clock, plural, say, show } from "./words.js";

const QUIET_S = 5;
const ACTIVE_PHASES = new Set(["RUNNING", "QUIESCING", "RECOVERING"]);

/** The phase to show: the current one, or that the data is old. */
function status(store) {
  const phase = store.document.state.phase ?? "WAITING";
  const name = phase.toLowerCase();
  if (store.link === "lost") return { kind: "LOST", mark: "?", words: phase === "UNREACHABLE" ? name : `was ${name}`, note: "connection lost" };
  if (ACTIVE_PHASES.has(phase) && store.quietSeconds() > QUIET_S) {
    const words = `no message for ${age(store.quietSeconds())}`;
    return { kind: "QUIET", mark: "?", words, note: words };
  }
  return { kind: phase, mark: PHASE_MARKS[phase] ?? "?", words: name, note: phase === "UNREACHABLE" ? "no coordinator leads" : "" };
}

export function drawHeader(store) {
  drawLink(store);
  const known = store.document;
  if (!known) return;
  const { state } = known;
  say($("cluster"), known.cluster);
  const job = state.job;
  const startup = startupOf(state);
  const steps = job ? `${job.name}: step ${state.step.toLocaleString("en")} of ${job.steps.toLocaleString("en")}` : "";
  const words = startup
    ? `${job ? job.name : "nodes"}: starting, stage ${startup.number} of ${startup.stages}`
    : steps || "no job: submit one with ftd submit JOB.toml";
  say($("job-words"), words);
  const bar = $("job-bar");
  show(bar, !!(job || startup));
  bar.ariaLabel = startup ? "Stages of the start" : "Steps committed";
  bar.setAttribute("aria-valuenow", startup ? startup.number : state.step ?? 0);
  bar.setAttribute("aria-valuemax", startup ? startup.stages : job?.steps ?? 1);
  bar.firstElementChild.style.transform = `scaleX(${share(state)})`;
  drawStatus(store);
  say($("footer"), `ftd ${state.version ?? ""} · generation ${state.generation ?? "–"}`
    + ` · ${plural(Object.keys(known.nodes).length, "node")}${state.leader ? ` · ${leads(state)}` : ""} · all data is what the coordinator publishes`);
}

/** Progress of the start; null if nothing is starting, or nobody coordinates it. */
const startupOf = (state) => (state.phase === "UNREACHABLE" ? null : state.startup);

function share(state) {
  const { job, step } = state;
  return startupOf(state)?.share ?? (job ? Math.min(1, step / Math.max(1, job.steps)) : 0);
}

/** Badge, title and banner. They also change with time alone, and a hidden page shows only its title. */
export function drawStatus(store) {
  const { state, cluster } = store.document;
  const { kind, mark, words, note } = status(store);
  const badge = $("phase");
  // Screen readers do not read a running clock; they read the banner once.
  badge.ariaLive = kind === "QUIET" ? "off" : "polite";
  say(badge, `${mark} ${words}`);
  badge.dataset.phase = kind;
  const title = `${mark} ${state.job ? `${state.job.name} ${Math.floor(share(state) * 100)} %` : cluster}${note ? `: ${note}` : ""}`;
  say(document.querySelector("title"), title);
  banner(store, state, kind);
  document.body.classList.toggle("stale", ["LOST", "QUIET", "UNREACHABLE"].includes(kind));
}

function leads({ leader, standbys, ineligible }) {
  const followers = standbys?.length ? `, ${standbys.join(", ")} standing by` : "";
  const excluded = Object.keys(ineligible ?? {});
  return `${leader} leads${followers}${excluded.length ? `, ${excluded.join(", ")} ineligible ▲` : ""}`;
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
    text = `Connection to the coordinator lost at ${clock(store.lostAt)}. This page shows the state of that time. Reconnecting…`
      + (state.standbys?.length ? ` Standbys: ${state.standbys.join(", ")}; open the page of one of them.` : "");
    grave = true;
  } else if (kind === "QUIET") {
    text = `No message since ${clock(Date.now() / 1000 - store.quietSeconds())}: is the broker down? This page shows the state of that time.`;
    grave = true;
  } else if (kind === "UNREACHABLE") {
    text = `No coordinator leads: ${state.reason}. Training continues without it; this page shows the state of that time.`;
    grave = true;
  } else if (kind === "PAUSED") {
    text = `Training is paused: ${state.waiting_for || "something is missing"}.`;
    grave = true;
  } else if (kind === "FAILED") {
    text = `The job failed: ${state.outcome}`;
    grave = true;
  } else if (kind === "FINISHED" && state.outcome) {
    text = `The job has ended: ${state.outcome}.`;
  } else if (startupOf(state)) {
    text = `Starting: ${state.startup.text}.`;
  } else if (state.waiting_for) {
    text = `Waiting for ${state.waiting_for}.`;
  } else if (state.planning) {
    text = `Planning for other numbers of nodes: ${state.planning.done} of ${state.planning.total}.`;
  }
  show(element, !!text);
  element.classList.toggle("grave", grave);
  if (text) say(element, text);
}
