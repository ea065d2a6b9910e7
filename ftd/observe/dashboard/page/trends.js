// Losses, throughput, goodput and learning rate over time, with failures marked; drawn by plotly, which loads after the first paint.

import { $, clock, make, number, plural, rate, say } from "./words.js";

const STEP = 0, AT = 1, LOSS = 2, SAMPLES = 3, PRODUCTIVE = 4, ELAPSED = 5, TOKENS = 7, RATE = 8;
const PERIOD_MS = 1000;
const MAX_LINES = 40;
const KINDS = {
  failure: { mark: "✖", symbol: "x", words: "failure", colour: "--bad" },
  rollback: { mark: "◀", symbol: "triangle-left", words: "rollback to a snapshot", colour: "--warn" },
  pause: { mark: "■", symbol: "square", words: "paused", colour: "--warn" },
  join: { mark: "✚", symbol: "cross", words: "node joined", colour: "--good" },
};
let plotly = null;
let loading = false;
let visible = true;
let timer = null;
let drawnAt = 0;
let store = null;

export function setUpTrends(known) {
  store = known;
  new IntersectionObserver((entries) => {
    visible = entries.at(-1).isIntersecting;
    if (visible) later();
  }).observe($("chart"));
  new ResizeObserver(() => later()).observe($("chart"));
}

export function drawTrends(known) {
  legend(known.document);
  if (!known.document.trend[1].length) return;
  if (plotly) return later();
  if (!loading) {
    loading = true;
    $("chart").replaceChildren(make("p", { class: "quiet" }, "the chart is being drawn"));
    // After the first paint: plotly is 1.5 MB and takes a moment to parse.
    const begin = () => load(known.document.plotly);
    if (window.requestIdleCallback) requestIdleCallback(begin, { timeout: 2000 });
    else setTimeout(begin, 200);
  }
}

export function themeChanged() {
  drawnAt = -PERIOD_MS;
  clearTimeout(timer);
  timer = null;
  later();
}

function load(path) {
  const script = make("script", { src: path });
  script.async = true;
  script.onload = () => {
    plotly = window.Plotly;
    later();
  };
  script.onerror = () => {
    loading = false;
    $("chart").replaceChildren(make("p", { class: "quiet" }, "the chart's library did not load; the page tries again with the next step"));
    script.remove();
  };
  document.head.append(script);
}

/** Draws at most once a second, when the browser is idle and the chart is visible. */
function later() {
  if (!plotly || timer !== null || !visible || document.hidden) return;
  timer = setTimeout(() => requestIdle(() => { timer = null; draw(); }), Math.max(0, drawnAt + PERIOD_MS - performance.now()));
}

function requestIdle(work) {
  if (window.requestIdleCallback) requestIdleCallback(work, { timeout: 500 });
  else setTimeout(work, 0);
}

function draw() {
  const { trend, marks, evaluations } = store.document;
  const points = trend[1];
  if (!points.length) return;
  drawnAt = performance.now();
  performance.mark("ftd-chart");
  const box = $("chart");
  if (!box.classList.contains("js-plotly-plot")) box.replaceChildren();
  const [data, layout] = figure(points, marks, evaluations, getComputedStyle(document.documentElement), box);
  plotly.react(box, data, layout, { displaylogo: false, responsive: false, displayModeBar: false, scrollZoom: false });
  const last = points.at(-1);
  box.dataset.line = layout.xaxis.gridcolor;
  box.setAttribute("role", "img");
  box.ariaLabel = `Loss, throughput and goodput since ${clock(points[0][AT])}: loss from ${number(points[0][LOSS])} to ${number(last[LOSS])}, `
    + (evaluations.length ? `${number(evaluations.at(-1).loss)} on held-out data, ` : "")
    + plural(marks.filter((m) => m.kind === "failure").length, "failure");
  performance.measure("ftd-chart", "ftd-chart");
}

function figure(points, marks, evaluations, style, box) {
  const colour = (name) => style.getPropertyValue(name).trim();
  const local = (seconds) => new Date((seconds - new Date(seconds * 1000).getTimezoneOffset() * 60) * 1000).toISOString().slice(0, 23);
  const x = points.map((p) => local(p[AT]));
  const steps = points.map((p) => p[STEP]);
  const line = (y, axis, name, hue, more) => ({
    x, y, yaxis: axis, type: "scatter", mode: points.length > 1 ? "lines" : "markers", name, line: { color: colour(hue), width: 1.8, ...more?.line },
    customdata: steps, hovertemplate: `%{y} · step %{customdata}<extra>${name}</extra>`, ...more,
  });
  const [amount, speed] = points.some((p) => p[TOKENS]) ? [TOKENS, "tokens/s"] : [SAMPLES, "samples/s"];
  const rates = points.map((p) => (p[ELAPSED] > 0 ? p[amount] / p[ELAPSED] : null));
  const learning = new Set(points.map((p) => p[RATE])).size > 1;
  const data = [
    line(points.map((p) => p[LOSS]), "y3", "loss", "--accent"),
    line(rates, "y2", speed, "--second", { text: rates.map(rate), hovertemplate: `%{text} · step %{customdata}<extra>${speed}</extra>` }),
    line(points.map((p) => (p[ELAPSED] > 0 ? Math.min(1, p[PRODUCTIVE] / p[ELAPSED]) : null)), "y", "goodput", "--good",
      { fill: "tozeroy", fillcolor: tint(colour("--good"), 0.15), hovertemplate: "%{y:.1%} · step %{customdata}<extra>goodput</extra>" }),
    ...(learning ? [line(points.map((p) => p[RATE]), "y5", "learning rate", "--accent", { hovertemplate: "%{y:.3~g} · step %{customdata}<extra>learning rate</extra>" })] : []),
    ...(evaluations.length ? [line(evaluations.map((e) => e.loss), "y3", "held-out loss", "--ink", {
      x: evaluations.map((e) => local(e.at)), customdata: evaluations.map((e) => e.step), mode: "lines+markers",
      line: { color: colour("--ink"), width: 1, dash: "dot" }, marker: { symbol: "diamond", size: 7, color: colour("--ink") },
    })] : []),
    ...markers(points, marks, colour, local),
  ];
  const faint = colour("--line");
  const narrow = box.clientWidth < 520;
  const axis = (domain, more) => ({
    domain, gridcolor: faint, zeroline: false, linecolor: faint, tickfont: { size: 11 }, nticks: 4, fixedrange: true, ...more,
  });
  // The learning rate is the lowest of the four plots; a constant one is omitted.
  const above = (...domain) => domain.map((share) => (learning ? 0.24 + 0.76 * share : share));
  const layout = {
    width: box.clientWidth, height: (narrow ? 340 : 400) * (learning ? 1.25 : 1), autosize: false, margin: { l: 58, r: 8, t: 4, b: 40 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: style.getPropertyValue("--sans") || "system-ui", color: colour("--faint"), size: 12 },
    showlegend: false, hovermode: "x unified", hoversubplots: "axis", dragmode: narrow ? false : "zoom", uirevision: "one",
    hoverlabel: { bgcolor: colour("--card"), bordercolor: faint, font: { color: colour("--ink") } },
    xaxis: { type: "date", gridcolor: faint, linecolor: faint, anchor: learning ? "y5" : "y", showspikes: false, nticks: narrow ? 4 : 9 },
    ...(learning ? { yaxis5: axis([0, 0.18], { rangemode: "tozero", exponentformat: "e", title: { text: narrow ? "lr" : "learning rate", font: { size: 12 } } }) } : {}),
    yaxis: axis(above(0, 0.24), { tickformat: ".0%", range: [0, 1.04], title: { text: "goodput", font: { size: 12 } } }),
    yaxis2: axis(above(0.31, 0.57), { rangemode: "tozero", separatethousands: true, title: { text: speed, font: { size: 12 } } }),
    yaxis3: axis(above(0.64, 0.97), { exponentformat: "e", title: { text: "loss", font: { size: 12 } } }),
    yaxis4: { domain: [0, 1], range: [0, 1], visible: false, fixedrange: true, anchor: "x" },
  };
  return [data, layout];
}

/** A line through all plots with a mark at its top, whose shape tells the kind without colour. */
function markers(points, marks, colour, local) {
  const since = points[0][AT] - points[0][ELAPSED];
  const within = marks.filter((m) => m.at >= since);
  return Object.entries(KINDS).flatMap(([kind, look]) => {
    const these = within.filter((m) => m.kind === kind);
    if (!these.length) return [];
    const lines = kind === "join" || these.length > MAX_LINES ? [] : [{
      x: these.flatMap((m) => [local(m.at), local(m.at), null]), y: these.flatMap(() => [0, 0.975, null]), yaxis: "y4", type: "scatter",
      mode: "lines", line: { color: colour(look.colour), width: 1, dash: "dot" }, hoverinfo: "skip",
    }];
    return [...lines, {
      x: these.map((m) => local(m.at)), y: these.map(() => 0.985), yaxis: "y4", type: "scatter", mode: "markers",
      marker: { symbol: look.symbol, size: these.length > MAX_LINES ? 6 : 9, color: colour(look.colour), line: { width: 0 } },
      text: these.map((m) => `${m.node ? `${m.node}: ` : ""}${wrapped(m.text)}`), hovertemplate: `%{text}<extra>${look.words}</extra>`,
    }];
  });
}

/** Removes HTML: plotly would interpret some tags in labels. */
function wrapped(text) {
  const plain = text.replace(/[<>&]/g, " ").slice(0, 240);
  return plain.replace(/(.{50}\S*)\s/g, "$1<br>");
}

function tint(hex, alpha) {
  const parts = /^#(..)(..)(..)$/.exec(hex)?.slice(1).map((two) => parseInt(two, 16));
  return parts ? `rgba(${parts.join(",")},${alpha})` : "rgba(0,0,0,0)";
}

function legend(known) {
  const counts = {};
  const first = known.trend[1][0];
  const since = first ? first[AT] - first[ELAPSED] : Infinity;
  for (const mark of known.marks) if (mark.at >= since) counts[mark.kind] = (counts[mark.kind] ?? 0) + 1;
  const parts = Object.entries(KINDS).filter(([kind]) => counts[kind]).map(([kind, look]) => `${look.mark} ${look.words} ${counts[kind]}`);
  if (known.evaluations.length) parts.push("◆ loss on held-out data");
  say($("legend"), parts.length ? `marked: ${parts.join("   ")}` : "");
}
