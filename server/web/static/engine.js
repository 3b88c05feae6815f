// The live view: what the engine is doing now, read from /metrics once a second.
import { text } from "./server.js";

const EVERY_MS = 1000;
const KEPT = 120; // points of a chart: two minutes
const MOST_SLOTS = 256;
const byId = (id) => document.getElementById(id);

let timer = null;
let last = null;
const series = { rate: [], running: [], waiting: [], pages: [] };

/** Prometheus' text format as [{name, labels, value}]. */
export function parseMetrics(exposition) {
  const found = [];
  for (const line of exposition.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
    }
    found.push({ name: match[1], labels, value: Number(match[3]) });
  }
  return found;
}

function sum(metrics, name) {
  return metrics.filter((one) => one.name === name).reduce((total, one) => total + one.value, 0);
}

function share(part, whole) {
  return whole > 0 ? `${(100 * part / whole).toFixed(0)}%` : "–";
}

function push(name, value) {
  series[name].push(value);
  if (series[name].length > KEPT) series[name].shift();
}

const SVG = "http://www.w3.org/2000/svg";

/** Lines over time; `top` is the value at the upper edge, written there. */
function draw(id, lines, top, label) {
  const [width, height] = [300, 120];
  const svg = byId(id);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.replaceChildren();
  lines.forEach((values, index) => {
    const path = document.createElementNS(SVG, "path");
    const step = width / (KEPT - 1);
    const start = KEPT - values.length;
    path.setAttribute("d", values.map((value, i) =>
      `${i ? "L" : "M"}${((start + i) * step).toFixed(1)} ${(height - 6 - (height - 20) * value / top).toFixed(1)}`,
    ).join(""));
    if (index) path.setAttribute("class", "second");
    svg.append(path);
  });
  svg.parentElement.querySelector(".top").textContent = label;
}

function tile(name, value) {
  const made = document.createElement("div");
  made.className = "tile";
  const number = document.createElement("b");
  number.textContent = value;
  const what = document.createElement("span");
  what.textContent = name;
  made.append(number, what);
  return made;
}

function showSlots(running, waiting) {
  const slots = byId("slots");
  const shown = Math.min(MOST_SLOTS, running + waiting);
  slots.setAttribute("aria-label", `${running} requests running, ${waiting} waiting`);
  slots.replaceChildren(...Array.from({ length: Math.max(shown, 1) }, (_, index) => {
    const slot = document.createElement("i");
    if (index < running) slot.className = "used";
    else if (index < running + waiting) slot.className = "waits";
    return slot;
  }));
}

function showTenants(metrics) {
  const rows = new Map();
  for (const { name, labels, value } of metrics) {
    if (labels.tenant === undefined) continue;
    const row = rows.get(labels.tenant) ?? { running: 0, waiting: 0, seconds: 0 };
    if (name === "jaxserve:tenant_requests_running") row.running = value;
    if (name === "jaxserve:tenant_requests_waiting") row.waiting = value;
    if (name.startsWith("jaxserve:tenant_device_seconds")) row.seconds = value;
    rows.set(labels.tenant, row);
  }
  const body = byId("tenants").tBodies[0];
  const lines = [["tenant", "running", "waiting", "device seconds"]];
  for (const [tenant, row] of rows) {
    lines.push([tenant || "(all)", row.running, row.waiting, row.seconds.toFixed(1)]);
  }
  if (lines.length === 1) lines.push(["nobody yet", "", "", ""]);
  body.replaceChildren(...lines.map((cells, index) => {
    const line = document.createElement("tr");
    line.append(...cells.map((cell) => {
      const made = document.createElement(index ? "td" : "th");
      made.textContent = cell;
      return made;
    }));
    return line;
  }));
}

function show(metrics) {
  const running = sum(metrics, "vllm:num_requests_running");
  const waiting = sum(metrics, "vllm:num_requests_waiting");
  const pages = sum(metrics, "vllm:kv_cache_usage_perc");
  const made = sum(metrics, "vllm:generation_tokens_total");
  const read = sum(metrics, "vllm:prompt_tokens_total");
  const now = performance.now();
  if (last) {
    const seconds = (now - last.now) / 1000;
    push("rate", Math.max(0, (made - last.made) / seconds));
  }
  last = { now, made };
  push("running", running);
  push("waiting", waiting);
  push("pages", pages);
  const hits = sum(metrics, "vllm:prefix_cache_hits_total");
  const queries = sum(metrics, "vllm:prefix_cache_queries_total");
  const padding = sum(metrics, "jaxserve:padding_tokens_total");
  const computed = sum(metrics, "jaxserve:step_tokens_total");
  const rate = series.rate.at(-1) ?? 0;
  byId("tiles").replaceChildren(
    tile("running", running),
    tile("waiting", waiting),
    tile("KV pages in use", `${(100 * pages).toFixed(0)}%`),
    tile("prompt tokens from the prefix cache", share(hits, queries)),
    tile("tokens read", read.toLocaleString()),
    tile("tokens written", made.toLocaleString()),
    tile("padding in steps", share(padding, padding + computed)),
    tile("compilations after ready", sum(metrics, "jaxserve:compilations_after_ready")),
  );
  byId("rate-now").textContent = rate ? `(${rate.toFixed(1)})` : "";
  const fastest = Math.max(10, ...series.rate);
  draw("rate", [series.rate], fastest, `top: ${fastest.toFixed(0)}`);
  const most = Math.max(4, ...series.running, ...series.waiting);
  draw("load", [series.running, series.waiting], most, `top: ${most}`);
  draw("pages", [series.pages], 1, "top: 100%");
  showSlots(running, waiting);
  showTenants(metrics);
}

async function update() {
  try {
    show(parseMetrics(await text("metrics")));
  } catch (error) {
    byId("tiles").replaceChildren(tile("the engine's metrics", error.message));
  }
}

export function startEngine() {
  if (timer !== null) return;
  update();
  timer = setInterval(update, EVERY_MS);
}

export function stopEngine() {
  clearInterval(timer);
  timer = null;
}
