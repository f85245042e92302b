// The chat: conversations, streamed answers, what they cost, and the requests behind them as code.

import { ApiError, address, ask, events, getKey } from "./api.js";
import { Conversations } from "./conversations.js";
import { $, SpokenText, announce, duration, h, shown, tabs } from "./dom.js";
import { markdown } from "./markdown.js";
import { Pictures, content, shortened, views } from "./pictures.js";
import { Sampling } from "./sampling.js";
import { curl, python } from "./snippets.js";
import { TokenReader, appendTokens, markEnd, tokenBox } from "./tokens.js";

const PREFERRED_ALTERNATIVES = 5;
const LOGPROBS = "jaxserve.logprobs";

export class Chat {
  constructor() {
    this.facts = null;
    this.running = null; // the AbortController of the answer that comes
    this.spoken = new SpokenText();
    this.store = new Conversations();
    this.sampling = new Sampling($("settings"));
    this.pictures = new Pictures($("pictures"), $("chat"), $("prompt"), toast, () => this.store.numImages, () => this.showReady());
    this.titles = new Map(); // id of a request -> title of its conversation, for the engine's view
    $("show-logprobs").checked = localStorage.getItem(LOGPROBS) === "yes";
    this.bindControls();
    this.showConversation();
  }

  /** Tell what the server can do. */
  bind(facts) {
    this.facts = facts;
    this.sampling.bind(facts);
    $("show-logprobs").disabled = !facts.max_logprobs;
    this.pictures.bind(facts.chat ? facts.images : 0);
    const ask = facts.images ? "Ask something; images can be pasted or dropped" : "Ask something";
    $("prompt").placeholder = facts.chat ? ask : "Begin a text: this model has no chat template";
    this.showReady();
  }

  /** A message can be sent once the server is known and no picture is being read. */
  showReady() {
    $("send").disabled = !this.facts || this.pictures.reading > 0;
  }

  bindControls() {
    const prompt = $("prompt");
    $("send").disabled = true;
    $("send").addEventListener("click", () => this.send());
    $("stop").addEventListener("click", () => this.running?.abort());
    prompt.addEventListener("input", () => fit(prompt));
    prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running && !document.querySelector("dialog[open]")) this.running.abort();
    });
    $("new-conversation").addEventListener("click", () => this.choose(null));
    $("show-logprobs").addEventListener("change", (event) => {
      localStorage.setItem(LOGPROBS, event.target.checked ? "yes" : "no");
      this.showMessages();
    });
    this.sampling.system.addEventListener("input", () => {
      this.store.current.system = this.sampling.system.value;
      this.store.changed();
    });
    $("open-code").addEventListener("click", () => this.showCode());
    $("code-close").addEventListener("click", () => $("code-dialog").close());
    $("code-copy").addEventListener("click", () => copy($("code-text")));
    tabs([$("code-curl"), $("code-python")], (button) => this.fillCode(button.id === "code-python"));
  }

  // -- conversations --------------------------------------------------------------------------

  choose(id) {
    this.running?.abort();
    this.store.choose(id);
    this.showConversation();
    document.dispatchEvent(new CustomEvent("close-drawers"));
    $("prompt").focus();
  }

  showConversation() {
    this.sampling.system.value = this.store.current.system;
    this.showList();
    this.showMessages();
  }

  showList() {
    const { index, current } = this.store;
    $("conversation-list").replaceChildren(...index.map(({ id, title }) =>
      h("li", {},
        h("button", { type: "button", class: "conversation", "aria-current": id === current.id ? "true" : null, onclick: () => this.choose(id) }, title || "Untitled"),
        h("button", { type: "button", class: "icon small", "aria-label": `Delete ${title || "Untitled"}`, title: "Delete", onclick: () => this.remove(id) }, "\u00d7"))));
  }

  remove(id) {
    if (this.store.current.id === id) this.running?.abort();
    this.store.remove(id);
    this.showConversation();
    announce("Deleted");
    $("new-conversation").focus();
  }

  // -- messages -------------------------------------------------------------------------------

  showMessages() {
    const { messages } = this.store.current;
    const box = $("messages");
    this.views = messages.map((message) => new MessageView(message, this));
    box.replaceChildren(...(messages.length ? this.views.map((view) => view.element) : [this.welcome()]));
    this.markLast();
    this.showLegend();
    box.scrollTop = box.scrollHeight;
  }

  showLegend() {
    $("legend-logprobs").hidden = !(this.wantsTokens && this.store.current.messages.some((one) => one.tokens?.length));
  }

  get wantsTokens() {
    return $("show-logprobs").checked;
  }

  welcome() {
    const examples = ["What is 12 + 30?", "Sort: 67, 50, 0, 58, 99", "Write a story: Carla, bear, kite."];
    return h("div", { class: "welcome" },
      h("h2", {}, "Say something"),
      h("p", {}, "What you write goes to this server alone, and stays in this browser."),
      h("ul", {}, ...examples.map((text) => h("li", {}, h("button", { type: "button", onclick: () => this.send(text) }, text)))));
  }

  markLast() {
    this.views.forEach((view, index) => view.setLast(index === this.views.length - 1));
  }

  // -- asking ---------------------------------------------------------------------------------

  send(text = $("prompt").value) {
    if (this.running || !this.facts || this.pictures.reading || !(text.trim() || this.pictures.urls.length)) return;
    if (!this.pictures.hasRoom()) return; // the conversation may be another than when they were dropped
    const { current } = this.store;
    if (!this.readFields()) return;
    current.title ||= text.trim().slice(0, 60) || "An image";
    const images = this.pictures.taken();
    current.messages.push({ role: "user", content: text, ...(images.length ? { images } : {}) });
    $("prompt").value = "";
    fit($("prompt"));
    this.answer();
  }

  regenerate() {
    const { messages } = this.store.current;
    if (this.running || !this.readFields()) return;
    if (messages.at(-1)?.role === "assistant") messages.pop();
    this.answer();
  }

  /** Take the images out of a message, and it with its answer where it has nothing else. */
  dropImages(message) {
    const { messages } = this.store.current;
    if (this.running) return;
    delete message.images;
    const place = messages.indexOf(message);
    if (!message.content.trim()) messages.splice(place, messages[place + 1]?.role === "assistant" ? 2 : 1);
    this.store.save();
    this.showMessages();
    announce("Images removed");
    $("prompt").focus();
  }

  /** The parameters of the panel, or null when one of them is wrong, which the user is told. */
  readFields() {
    try {
      return this.sampling.fields();
    } catch (error) {
      document.dispatchEvent(new CustomEvent("open-settings"));
      toast(error.message);
      return null;
    }
  }

  /** Path and body of a request that answers messages. */
  request(messages) {
    const { facts } = this;
    const body = { model: facts.models[0] };
    if (facts.chat) {
      const { system } = this.store.current;
      body.messages = messages.map((one) => ({ role: one.role, content: content(one.content, one.images) }));
      if (system) body.messages.unshift({ role: "system", content: system });
    } else {
      body.prompt = messages.map((one) => one.content).join("");
    }
    Object.assign(body, this.sampling.fields());
    if (this.wantsTokens && facts.max_logprobs) {
      const count = Math.min(PREFERRED_ALTERNATIVES, facts.max_logprobs);
      Object.assign(body, facts.chat ? { logprobs: true, top_logprobs: count } : { logprobs: count });
    }
    Object.assign(body, { stream: true, stream_options: { include_usage: true } });
    return [facts.chat ? "v1/chat/completions" : "v1/completions", body];
  }

  async answer() {
    const { current } = this.store;
    const [path, body] = this.request(current.messages);
    const message = { role: "assistant", content: "" };
    current.messages.push(message);
    this.showList();
    this.showMessages();
    const view = this.views.at(-1);
    const running = new AbortController();
    const requestId = `page-${randomHex(12)}`;
    this.titles.set(requestId, current.title);
    this.setRunning(running);
    this.spoken.begin();
    const clock = new Clock();
    const reader = new TokenReader();
    try {
      const response = await ask(path, { body, signal: running.signal, requestId });
      for await (const chunk of events(response)) {
        const choice = chunk.choices?.[0];
        if (chunk.usage) clock.usage = chunk.usage;
        if (!choice) continue;
        this.take(message, view, choice, reader, clock);
      }
    } catch (error) {
      if (running.signal.aborted) message.finish = "stopped";
      else if (error instanceof ApiError) message.error = error.message;
      else throw error;
    } finally {
      message.stats = clock.stats(message);
      this.titles.delete(requestId);
      this.setRunning(null);
      this.finish(current, message, view);
    }
  }

  /** What a chunk adds to an answer. */
  take(message, view, choice, reader, clock) {
    const delta = choice.delta ?? { content: choice.text };
    const thought = delta.reasoning ?? delta.reasoning_content ?? "";
    const text = delta.content ?? "";
    const tokens = choice.delta ? reader.chat(choice.logprobs) : reader.completion(choice.logprobs);
    if (thought || text || tokens.length || delta.tool_calls) clock.came();
    if (thought) message.reasoning = (message.reasoning ?? "") + thought;
    for (const call of delta.tool_calls ?? []) addCall(message, call);
    message.content += text;
    if (tokens.length) (message.tokens ??= []).push(...tokens);
    if (choice.finish_reason) message.finish = choice.finish_reason;
    if (choice.finish_reason === "stop") markEnd(tokens, message.content);
    view.grew(tokens);
    this.spoken.add(text);
    this.store.changed();
  }

  finish(conversation, message, view) {
    view.show();
    this.markLast();
    this.showLegend();
    scrollDown();
    const end = message.error ? `Error: ${message.error}` : message.finish === "stopped" ? "Stopped" : "End of the answer";
    this.spoken.end(end);
    if (conversation === this.store.current && !this.store.save()) toast("The browser's storage is full: of this conversation the images, or all, are not kept.");
    this.showList();
  }

  setRunning(running) {
    this.running = running;
    // who pressed the one with the keyboard finds the other in its place
    const focused = document.activeElement === $("send") || document.activeElement === $("stop");
    $("send").hidden = running !== null;
    $("stop").hidden = running === null;
    if (focused) $(running ? "stop" : "send").focus();
  }

  // -- code -----------------------------------------------------------------------------------

  showCode() {
    if (!this.facts || !this.readFields()) return;
    this.fillCode($("code-python").getAttribute("aria-selected") === "true");
    $("code-copy").textContent = "Copy";
    $("code-dialog").showModal();
  }

  fillCode(asPython) {
    const messages = [...this.store.current.messages];
    if (messages.at(-1)?.role === "assistant") messages.pop();
    const draft = $("prompt").value;
    if (draft.trim()) messages.splice(0, messages.length, ...this.store.current.messages, { role: "user", content: draft });
    if (!messages.length) messages.push({ role: "user", content: "What is 12 + 30?" });
    const [path, body] = this.request(shortened(messages));
    const hasKey = this.facts.has_keys || getKey() !== "";
    $("code-text").textContent = asPython ? python(address("v1"), body, hasKey) : curl(address(path), body, hasKey);
  }
}

/** One message on the screen. */
class MessageView {
  constructor(message, chat) {
    this.message = message;
    this.chat = chat;
    this.waiting = null;
    this.renderMs = 0;
    this.thought = h("details", { hidden: true }, h("summary", {}, "Thoughts"), h("div", { class: "thought" }));
    this.body = h("div", { class: "body" });
    this.foot = h("div", { class: "foot" });
    const who = message.role === "user" ? "You" : "Answer";
    this.element = h("article", { class: `message ${message.role}`, "aria-label": who }, this.thought, this.body, this.foot);
    this.show();
  }

  setLast(last) {
    this.last = last;
    this.showFoot();
  }

  get asTokens() {
    return this.chat.wantsTokens && this.message.tokens?.length > 0;
  }

  /** More has come: tokens are appended at once, Markdown is made anew from time to time. */
  grew(tokens) {
    if (this.asTokens && this.box) {
      appendTokens(this.box, tokens);
      scrollDown();
    } else if (this.asTokens) {
      this.show();
    } else {
      this.waiting ??= setTimeout(() => this.show(), Math.max(60, 10 * this.renderMs));
    }
  }

  show() {
    clearTimeout(this.waiting);
    this.waiting = null;
    const begin = performance.now();
    const { message } = this;
    const near = isNearEnd();
    this.box = null;
    if (message.role === "user") {
      this.body.replaceChildren(...views(message.images ?? []), h("p", { class: "plain" }, message.content));
      if (message.images) this.body.append(h("button", { type: "button", class: "plain", onclick: () => this.chat.dropImages(message) }, "Remove images"));
    } else if (this.asTokens) {
      this.box = tokenBox();
      appendTokens(this.box, message.tokens);
      this.body.replaceChildren(this.box);
    } else {
      this.body.replaceChildren(...this.rendered());
    }
    this.thought.hidden = !message.reasoning;
    this.thought.lastChild.textContent = message.reasoning ?? "";
    this.showFoot();
    this.renderMs = performance.now() - begin;
    if (near) scrollDown();
  }

  rendered() {
    const { content, calls } = this.message;
    const nodes = isJson(content) ? [h("pre", { "data-language": "json", tabindex: 0 }, h("code", {}, JSON.stringify(JSON.parse(content), null, 2)))] : markdown(content);
    if (calls) nodes.push(h("pre", { "data-language": "calls", tabindex: 0 }, h("code", {}, JSON.stringify(calls, null, 2))));
    if (!nodes.length && !this.message.error && !this.message.stats) nodes.push(h("p", { class: "pulse", "aria-hidden": "true" }, h("i"), h("i"), h("i")));
    return nodes;
  }

  showFoot() {
    const { message } = this;
    if (message.role === "user" || !message.stats) return this.foot.replaceChildren();
    const { ttft, rate, tokens, total } = message.stats;
    const told = [];
    if (ttft !== null) told.push(stat("TTFT", duration(ttft), "time to the first token, as this browser saw it"));
    if (rate !== null) told.push(stat("Speed", `${shown(rate, rate < 10 ? 1 : 0)} tok/s`, "tokens after the first, by the time between first and last"));
    if (tokens !== null) told.push(stat("Tokens", shown(tokens), "generated"));
    if (total !== null) told.push(stat("Total", duration(total), "from the question to the end"));
    const ends = { stopped: "stopped", length: "cut at max tokens", stop: null };
    const end = message.finish in ends ? ends[message.finish] : message.finish;
    this.foot.replaceChildren(
      message.error ? h("p", { class: "problem" }, message.error) : "",
      h("dl", { class: "stats" }, ...told, end ? h("div", {}, h("dt", {}, "End"), h("dd", {}, end)) : ""),
      h("div", { class: "row" },
        this.last ? h("button", { type: "button", class: "plain", onclick: () => this.chat.regenerate() }, "Regenerate") : "",
        message.content ? h("button", { type: "button", class: "plain", onclick: (event) => copyText(message.content, event.currentTarget) }, "Copy") : ""));
  }
}

const stat = (name, value, help) => h("div", { title: help }, h("dt", {}, name), h("dd", {}, value));

/** When an answer's tokens came. */
class Clock {
  constructor() {
    this.begin = performance.now();
    this.first = this.last = null;
    this.chunks = 0;
    this.usage = null;
  }

  came() {
    this.last = performance.now();
    this.first ??= this.last;
    this.chunks += 1;
  }

  stats(message) {
    const tokens = this.usage?.completion_tokens ?? message.tokens?.length ?? (this.chunks || null);
    const took = this.first === null ? 0 : (this.last - this.first) / 1000;
    return {
      ttft: this.first === null ? null : (this.first - this.begin) / 1000,
      rate: tokens > 1 && took > 0 ? (tokens - 1) / took : null,
      tokens,
      total: this.last === null ? null : (this.last - this.begin) / 1000,
    };
  }
}

function addCall(message, call) {
  const calls = (message.calls ??= []);
  const known = (calls[call.index ?? 0] ??= { name: "", arguments: "" });
  known.name += call.function?.name ?? "";
  known.arguments += call.function?.arguments ?? "";
}

function isJson(text) {
  if (!/^\s*[{[]/.test(text) || text.length > 100_000) return false;
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** The box grows with its text. */
function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

const isNearEnd = () => $("messages").scrollHeight - $("messages").scrollTop - $("messages").clientHeight < 120;

function scrollDown() {
  const box = $("messages");
  if (isNearEnd()) box.scrollTop = box.scrollHeight;
}

async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    announce("Copied");
    setTimeout(() => (button.textContent = "Copy"), 1500);
  } catch {
    // only secure origins may write to the clipboard
    toast("The browser does not let this page copy: select the text and copy it yourself.");
  }
}

function copy(element) {
  const range = document.createRange();
  range.selectNodeContents(element);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
  return copyText(element.textContent, $("code-copy"));
}

/** A line that goes away by itself. */
export function toast(text) {
  const element = h("p", { class: "toast", role: "alert" }, text);
  document.body.append(element);
  setTimeout(() => element.remove(), 6000);
}

const randomHex = (bytes) => Array.from(crypto.getRandomValues(new Uint8Array(bytes)), (one) => one.toString(16).padStart(2, "0")).join("");
