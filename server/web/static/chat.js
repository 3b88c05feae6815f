// The playground: a conversation, its settings, streaming, and stopping.
import { stream } from "./server.js";

const byId = (id) => document.getElementById(id);
const EXAMPLES = {
  json_schema: '{\n  "type": "object",\n  "properties": {"city": {"type": "string"}, "people": {"type": "integer"}},\n  "required": ["city", "people"]\n}',
  regex: "[0-9]{1,3}",
  choice: "yes\nno",
};
const NAMES = { json_schema: "JSON schema", regex: "Regular expression", choice: "Choices, one per line" };

let history = [];
let running = null;

function number(id) {
  const value = byId(id).value;
  return value === "" ? undefined : Number(value);
}

function structure() {
  const kind = byId("structure").value;
  const given = byId("structure-text").value;
  if (kind === "json_object") return { response_format: { type: kind } };
  if (kind === "json_schema") {
    return { response_format: { type: kind, json_schema: { name: "answer", schema: JSON.parse(given) } } };
  }
  if (kind === "regex") return { structured_outputs: { regex: given } };
  if (kind === "choice") return { structured_outputs: { choice: given.split("\n").filter(Boolean) } };
  return {};
}

function makeBody(model) {
  const system = byId("system").value.trim();
  return {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...history],
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
    ...structure(),
  };
}

function element(kind, className, content = "") {
  const made = document.createElement(kind);
  made.className = className;
  made.textContent = content;
  return made;
}

function addMessage(role, content) {
  byId("hello")?.remove();
  const box = element("div", `message ${role}`);
  box.append(element("span", "who", role === "user" ? "you" : "model"));
  const body = element("span", "body", content);
  box.append(body);
  byId("messages").append(box);
  scroll();
  return { box, body };
}

function scroll() {
  const list = byId("messages");
  list.scrollTop = list.scrollHeight;
}

/** Adds one streamed piece; reasoning stands before the answer, in a lighter colour. */
function addPiece(answer, delta) {
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought) {
    if (!answer.thinking) {
      answer.thinking = element("span", "thinking");
      answer.body.before(answer.thinking);
    }
    answer.thinking.textContent += thought;
  }
  if (delta.content) {
    answer.body.textContent += delta.content;
    answer.text += delta.content;
  }
}

function describe(answer) {
  const parts = [];
  const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);
  if (answer.first) parts.push(`first token after ${seconds(answer.first - answer.start)}`);
  const usage = answer.usage;
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${usage.prompt_tokens} tokens in${cached ? ` (${cached} cached)` : ""}, ${usage.completion_tokens} out`);
    const spent = (answer.last - answer.first) / 1000;
    if (usage.completion_tokens > 1 && spent > 0) {
      parts.push(`${((usage.completion_tokens - 1) / spent).toFixed(1)} tokens/s`);
    }
  }
  if (answer.stopped) parts.push("stopped");
  else if (answer.reason && answer.reason !== "stop") parts.push(`ended by ${answer.reason}`);
  return parts.join(" · ");
}

async function send(options) {
  const prompt = byId("prompt").value.trim();
  if (!prompt || running) return;
  history.push({ role: "user", content: prompt });
  addMessage("user", prompt);
  byId("prompt").value = "";
  const answer = { ...addMessage("assistant", ""), text: "", start: performance.now(), id: null };
  answer.box.classList.add("growing");
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  try {
    await stream(
      "v1/chat/completions",
      makeBody(options.model()),
      running.signal,
      (headers) => { answer.id = headers.get("x-request-id"); },
      (event) => onEvent(answer, event),
    );
  } catch (error) {
    if (error.name === "AbortError") answer.stopped = true;
    else answer.box.append(element("span", "failed", error.message));
  } finally {
    finish(answer, options);
  }
}

function onEvent(answer, event) {
  if (event.error) throw new Error(event.error.message);
  const choice = event.choices?.[0];
  if (choice) {
    addPiece(answer, choice.delta);
    if (choice.delta.content || choice.delta.reasoning_content) {
      answer.last = performance.now();
      answer.first ??= answer.last;
    }
    answer.reason = choice.finish_reason ?? answer.reason;
  }
  if (event.usage) answer.usage = event.usage;
  scroll();
}

function finish(answer, options) {
  running = null;
  byId("send").disabled = false;
  byId("stop").disabled = true;
  answer.box.classList.remove("growing");
  if (answer.text) history.push({ role: "assistant", content: answer.text });
  else history.pop(); // a question that got nothing is not part of the conversation
  const facts = element("div", "facts", describe(answer));
  if (answer.id) {
    const link = element("button", "link", "where its time went");
    link.type = "button";
    link.addEventListener("click", () => options.openRequest(answer.id));
    facts.append(facts.textContent ? " · " : "", link);
  }
  answer.box.after(facts);
  scroll();
  byId("prompt").focus();
}

function clear() {
  running?.abort();
  history = [];
  byId("messages").replaceChildren();
}

export function startChat(options) {
  byId("settings").open = matchMedia("(min-width: 761px)").matches;
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send(options);
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send(options);
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", clear);
  byId("structure").addEventListener("change", () => {
    const kind = byId("structure").value;
    byId("structure-label").hidden = !NAMES[kind];
    byId("structure-name").textContent = NAMES[kind] ?? "";
    byId("structure-text").value = EXAMPLES[kind] ?? "";
  });
}
