// Joins the parts of the page: tabs, theme, the state of the server, and the three views.
import { api } from "./server.js";
import { startChat } from "./chat.js";
import { listRequests, showRequest } from "./waterfall.js";
import { startEngine, stopEngine } from "./engine.js";

const VIEWS = ["chat", "request", "engine"];
const CHECK_MS = 5000;
const byId = (id) => document.getElementById(id);

function choose(view, { focus = false } = {}) {
  for (const name of VIEWS) {
    const tab = byId(`tab-${name}`);
    const chosen = name === view;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    byId(`view-${name}`).hidden = !chosen;
    if (chosen && focus) tab.focus();
  }
  if (view === "request") listRequests(byId("requests"), openRequest);
  if (view === "engine") startEngine();
  else stopEngine();
}

function startTabs() {
  for (const name of VIEWS) byId(`tab-${name}`).addEventListener("click", () => choose(name));
  document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
    const now = VIEWS.findIndex((name) => byId(`tab-${name}`).tabIndex === 0);
    const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: VIEWS.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    choose(VIEWS[(next + VIEWS.length) % VIEWS.length], { focus: true });
  });
}

function startTheme() {
  const root = document.documentElement;
  const kept = localStorage.getItem("jaxserve.theme");
  if (kept) root.dataset.theme = kept;
  byId("theme").addEventListener("click", () => {
    const dark = getComputedStyle(root).colorScheme === "dark" ||
      (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
    root.dataset.theme = dark ? "light" : "dark";
    localStorage.setItem("jaxserve.theme", root.dataset.theme);
  });
}

async function checkServer() {
  const state = byId("state");
  try {
    const ready = await fetch("ready");
    state.textContent = ready.ok ? "ready" : (await ready.json()).reason ?? "not ready";
    state.className = `state ${ready.ok ? "ready" : "gone"}`;
    if (ready.ok && !byId("model").textContent) {
      byId("model").textContent = (await api("v1/models")).data[0].id;
    }
  } catch (error) {
    state.textContent = error.status === 401 ? "needs an API key (Settings)" : "no answer";
    state.className = "state gone";
  }
}

async function openRequest(id) {
  byId("request-id").value = id;
  choose("request");
  await showRequest(id, byId("waterfall"));
}

startTabs();
startTheme();
startChat({ openRequest, model: () => byId("model").textContent });
byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = byId("request-id").value.trim();
  if (id) openRequest(id);
});
byId("key").addEventListener("change", checkServer);
byId("options").addEventListener("submit", (event) => event.preventDefault());
checkServer();
setInterval(checkServer, CHECK_MS);
