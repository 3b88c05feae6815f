// From prompt to token: where the time of one request went, as a picture.
import { api } from "./server.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1000;
const LEFT = 190;
const ROW = 34;
const MOST_ANSWERS = 8;

/** 0.0123 -> "12 ms". */
export function seconds(value) {
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return `${value.toFixed(2)} s`;
}

function make(kind, attributes, content) {
  const made = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (content !== undefined) made.textContent = content;
  return made;
}

function element(kind, className, content) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (content !== undefined) made.textContent = content;
  return made;
}

function step(trace, name) {
  return trace.steps.find((each) => each.name === name);
}

/** Rows of the picture: {label, bars: [{kind, from, to, text, title}]}; times in seconds. */
export function toRows(trace) {
  const submitted = step(trace, "submitted")?.at ?? 0;
  const rows = [{
    label: "read and tokenise",
    bars: [{ kind: "host", from: 0, to: submitted, title: `the server: ${seconds(submitted)}` }],
  }];
  const shown = trace.answers.slice(0, MOST_ANSWERS);
  shown.forEach((answer, index) => {
    const of = trace.answers.length > 1 ? ` (answer ${index + 1})` : "";
    const started = answer.started_at ?? trace.seconds;
    rows.push({
      label: `wait in the queue${of}`,
      bars: [{ kind: "queue", from: answer.queued_at, to: started, title: `queued ${seconds(started - answer.queued_at)}` }],
    });
    if (answer.started_at === null || answer.started_at === undefined) return;
    rows.push({ label: `read the prompt${of}`, bars: (answer.prefill ?? []).map(prefillBar) });
    rows.push({ label: `write the answer${of}`, bars: (answer.decode ?? []).map(decodeBar) });
  });
  const written = step(trace, "written");
  if (written) {
    rows.push({
      label: "send",
      bars: [{ kind: "host", from: written.at, to: written.until, title: `${written.events} events, ${written.bytes.toLocaleString()} bytes` }],
    });
  }
  return rows;
}

function prefillBar(part) {
  const chunks = part.steps === 1 ? "a chunk" : `${part.steps} chunks`;
  return {
    kind: "prefill", from: part.at, to: part.until, text: `${part.tokens}`,
    title: `${chunks}, ${part.tokens} tokens in ${seconds(part.until - part.at)}; bucket ${part.bucket}, ` +
      `${part.padding_tokens.toFixed(0)} padding tokens, ${seconds(part.device_seconds)} of the device`,
  };
}

function decodeBar(part) {
  return {
    kind: "decode", from: part.at, to: part.until, text: `${part.tokens}`,
    title: `${part.tokens} tokens in ${part.steps} steps, ${seconds(part.until - part.at)}; ` +
      `${part.batch} requests per step, ${seconds(part.device_seconds)} of the device`,
  };
}

/** One sentence that says it all. */
export function headline(trace) {
  const answer = trace.answers[0];
  const parts = [];
  if (answer?.started_at) {
    parts.push(`${seconds(answer.started_at)} until it began`);
    if (answer.first_token_at) {
      const cached = answer.cached_tokens ? `, ${answer.cached_tokens} of them from the cache` : "";
      parts.push(`${seconds(answer.first_token_at - answer.started_at)} to read ${answer.prompt_tokens} tokens${cached}`);
      const spent = answer.last_token_at - answer.first_token_at;
      const rate = spent > 0 && answer.generated_tokens > 1 ? ` (${((answer.generated_tokens - 1) / spent).toFixed(1)} per second)` : "";
      parts.push(`${seconds(spent)} to write ${answer.generated_tokens}${rate}`);
    }
  }
  return `${seconds(trace.seconds)} in all${parts.length ? `: ${parts.join(", ")}` : ""}`;
}

function ticks(end) {
  const rough = end / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  return Array.from({ length: Math.floor(end / size) + 1 }, (_, i) => i * size);
}

function draw(trace) {
  const rows = toRows(trace);
  const end = Math.max(trace.seconds, 1e-6);
  const height = ROW * rows.length + 40;
  const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": headline(trace) });
  const x = (time) => LEFT + (WIDTH - LEFT - 12) * Math.min(Math.max(time, 0), end) / end;
  for (const time of ticks(end)) {
    svg.append(make("line", { x1: x(time), x2: x(time), y1: 22, y2: height - 6 }));
    svg.append(make("text", { x: x(time), y: 14, class: "soft", "text-anchor": "middle" }, time === 0 ? "0" : seconds(time)));
  }
  rows.forEach((row, index) => {
    const top = 28 + index * ROW;
    svg.append(make("text", { x: LEFT - 12, y: top + 18, "text-anchor": "end" }, row.label));
    for (const bar of row.bars) {
      const width = Math.max(2, x(bar.to) - x(bar.from));
      const rect = make("rect", { class: `bar ${bar.kind}`, x: x(bar.from), y: top, width, height: ROW - 10, rx: 3 });
      rect.append(make("title", {}, bar.title));
      svg.append(rect);
    }
    const all = row.bars.reduce((sum, bar) => sum + bar.to - bar.from, 0);
    const last = row.bars.at(-1);
    if (!last) return;
    // Beside the bar where there is room, else in it, else before it.
    const [before, after] = [x(row.bars[0].from), x(last.to)];
    const [at, anchor, kind] = after < WIDTH - 90 ? [after + 8, "start", "soft"]
      : after - before > 90 ? [after - 8, "end", "on-bar"] : [before - 8, "end", "soft"];
    svg.append(make("text", { x: at, y: top + 18, class: kind, "text-anchor": anchor }, seconds(all)));
  });
  return svg;
}

function legend() {
  const list = element("ul", "legend");
  for (const [kind, text] of Object.entries({
    host: "the server: text in, text out", queue: "waiting for a slot", prefill: "the device reads the prompt", decode: "the device writes",
  })) {
    const item = element("li");
    item.append(element("i", `swatch ${kind}`), text);
    list.append(item);
  }
  return list;
}

function numbers(trace) {
  const box = element("div", "numbers");
  const total = (name) => trace.answers.reduce((sum, answer) => sum + (answer[name] ?? 0), 0);
  const facts = {
    "of the device": seconds(trace.device_seconds),
    "prompt tokens": total("prompt_tokens").toLocaleString(),
    "from the prefix cache": total("cached_tokens").toLocaleString(),
    "tokens written": total("generated_tokens").toLocaleString(),
    "pages": total("pages").toLocaleString(),
    "padding tokens": total("padding_tokens").toFixed(1),
    "preemptions": total("preemptions"),
    "ended by": trace.finish_reason ?? "–",
  };
  if (trace.cost) facts.cost = Number(trace.cost).toPrecision(3);
  for (const [name, value] of Object.entries(facts)) {
    const tile = element("div", "tile");
    tile.append(element("b", "", value), element("span", "", name));
    box.append(tile);
  }
  return box;
}

/** Fetches a request's trace and draws it into `place`. A request that just ended may need a moment. */
export async function showRequest(id, place, tries = 5) {
  place.replaceChildren(element("p", "hello", "Loading …"));
  try {
    const trace = await api(`v1/requests/${encodeURIComponent(id)}/trace`);
    const link = element("a", "", "open in Perfetto: download the trace");
    link.href = `v1/requests/${encodeURIComponent(id)}/trace?format=chrome`;
    link.download = `${id}.json`;
    const frame = element("div", "scroll");
    frame.tabIndex = 0;
    frame.setAttribute("aria-label", "Waterfall");
    frame.append(draw(trace));
    place.replaceChildren(element("p", "headline", headline(trace)), legend(), frame, numbers(trace), link);
  } catch (error) {
    if (error.status === 404 && tries > 1) {
      await new Promise((done) => setTimeout(done, 300));
      return showRequest(id, place, tries - 1);
    }
    place.replaceChildren(element("p", "failed", error.message));
  }
}

/** The last requests as buttons, newest first. */
export async function listRequests(place, open) {
  try {
    const { data } = await api("v1/requests");
    const body = element("tbody");
    for (const one of data.slice(0, 20)) {
      const line = element("tr");
      const link = element("button", "link", one.id);
      link.type = "button";
      link.addEventListener("click", () => open(one.id));
      const first = element("td");
      first.append(link);
      line.append(
        first,
        element("td", "", one.route),
        element("td", "", new Date(one.received_at * 1000).toLocaleTimeString()),
        element("td", "", seconds(one.seconds)),
        element("td", "", one.finish_reason ?? ""),
      );
      body.append(line);
    }
    if (!data.length) body.append(element("tr", "", "None yet."));
    place.replaceChildren(body);
  } catch (error) {
    place.replaceChildren(element("caption", "failed", error.message));
  }
}
