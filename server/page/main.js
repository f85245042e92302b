// The page: its two views, the theme, the key, and what the server is.

import { ApiError, ask, getKey, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { $, tabs } from "./dom.js";
import { EngineView } from "./engine.js";

const THEME = "jaxserve.theme";
const THEMES = ["auto", "light", "dark"];

const chat = new Chat();
const engine = new EngineView($("engine"), chat);

// -- views --------------------------------------------------------------------------------------

const show = tabs([$("tab-chat"), $("tab-engine")], (button) => {
  const isEngine = button.id === "tab-engine";
  $("chat").hidden = isEngine;
  $("engine").hidden = !isEngine;
  document.body.dataset.view = isEngine ? "engine" : "chat";
  history.replaceState(null, "", isEngine ? "#engine" : "#chat");
  engine.setShown(isEngine);
});

// -- drawers ------------------------------------------------------------------------------------

const drawers = [
  [$("open-conversations"), $("conversations")],
  [$("open-settings"), $("settings")],
];

function setDrawer(button, drawer, open) {
  drawer.classList.toggle("open", open);
  button.setAttribute("aria-expanded", String(open));
  $("scrim").hidden = !drawers.some(([, one]) => one.classList.contains("open"));
  if (open) drawer.querySelector("button, input, textarea, select").focus({ preventScroll: true });
}

const closeDrawers = () => drawers.forEach(([button, drawer]) => setDrawer(button, drawer, false));

for (const [button, drawer] of drawers) {
  button.addEventListener("click", () => setDrawer(button, drawer, !drawer.classList.contains("open")));
  drawer.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !drawer.classList.contains("open")) return;
    event.stopPropagation();
    setDrawer(button, drawer, false);
    button.focus();
  });
}
$("scrim").addEventListener("click", closeDrawers);
document.addEventListener("close-drawers", closeDrawers);
document.addEventListener("open-settings", () => setDrawer(...drawers[1], true));

// -- theme --------------------------------------------------------------------------------------

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const names = { auto: "as the system", light: "light", dark: "dark" };
  $("theme").setAttribute("aria-label", `Theme: ${names[theme]}`);
  $("theme").title = `Theme: ${names[theme]}`;
  engine.redraw();
}

let theme = localStorage.getItem(THEME);
if (!THEMES.includes(theme)) theme = "auto";
setTheme(theme);
$("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  localStorage.setItem(THEME, theme);
  setTheme(theme);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => engine.redraw());

// -- key ----------------------------------------------------------------------------------------

function openKey(text) {
  $("key-text").textContent = text;
  $("key").value = getKey();
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

function useKey(key) {
  setKey(key);
  $("key-dialog").close();
  connect();
}

$("open-key").addEventListener("click", () => openKey("Servers that were started with keys want one of them with each request."));
$("key-save").addEventListener("click", () => useKey($("key").value.trim()));
$("key-forget").addEventListener("click", () => useKey(""));
$("key-cancel").addEventListener("click", () => $("key-dialog").close());
$("key").addEventListener("keydown", (event) => {
  if (event.key === "Enter") useKey($("key").value.trim());
});
document.addEventListener("key-wanted", () => openKey(getKey() ? "The server does not know this key." : "This server wants a key."));

// -- the server ---------------------------------------------------------------------------------

let waiting = null;

function setStatus(state, text) {
  document.querySelector("#model-status .dot").dataset.state = state;
  $("model-name").textContent = text;
}

async function connect() {
  clearTimeout(waiting);
  try {
    const facts = await (await ask("engine/facts")).json();
    setStatus("ok", facts.models[0]);
    $("model-status").title = `jaxserve ${facts.version}, context ${facts.context} tokens`;
    chat.bind(facts);
    engine.bind(facts);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    setStatus(error.status === 503 ? "loading" : "problem", error.status === 401 ? "key wanted" : error.message);
    if (error.status !== 401) waiting = setTimeout(connect, 1500);
  }
}

if (location.hash === "#engine") show($("tab-engine"));
else show($("tab-chat"));
connect();
$("prompt").focus({ preventScroll: true });
