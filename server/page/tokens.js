// Tokens coloured by their probability, with what else could have come.

import { $, h } from "./dom.js";

const LEVELS = [0.9, 0.5, 0.2, 0.05]; // the least probability of each but the last

/** Which colour a log-probability has: 0 likely, 4 unlikely. */
export function level(logprob) {
  const probability = Math.exp(logprob);
  const found = LEVELS.findIndex((least) => probability >= least);
  return found < 0 ? LEVELS.length : found;
}

/**
 * Tokens as they are kept, `{ t: text, l: logprob, a: [[text, logprob], ...] }`, of what a chunk says.
 * A character may be spread over several tokens: those are shown as one. A token with `e` has ended
 * the answer and is no part of its text.
 */
export class TokenReader {
  constructor() {
    this.bytes = [];
    this.part = null;
  }

  /** Tokens of the `logprobs` of a chat's chunk. */
  chat(logprobs) {
    const found = [];
    for (const entry of logprobs?.content ?? []) {
      const others = entry.top_logprobs.map((one) => [one.token, round(one.logprob)]);
      this.bytes.push(...entry.bytes);
      if (this.part) this.part.l = round(this.part.l + entry.logprob);
      else this.part = { t: "", l: round(entry.logprob), a: others };
      const text = whole(this.bytes);
      if (text === null) continue;
      this.part.t = text;
      found.push(this.part);
      this.bytes = [];
      this.part = null;
    }
    return found;
  }

  /** Tokens of the `logprobs` of a completion's chunk. */
  completion(logprobs) {
    return (logprobs?.tokens ?? []).map((text, index) => ({
      t: text,
      l: round(logprobs.token_logprobs[index] ?? 0),
      a: Object.entries(logprobs.top_logprobs?.[index] ?? {}).map(([one, value]) => [one, round(value)]),
    }));
  }
}

/** Mark a token that has ended an answer of this text, if the last one has. */
export function markEnd(tokens, content) {
  const last = tokens.at(-1);
  if (last && !content.endsWith(last.t)) last.e = 1;
}

const round = (value) => Math.round(value * 1e4) / 1e4;

function whole(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(bytes));
  } catch {
    return bytes.length > 8 ? new TextDecoder().decode(new Uint8Array(bytes)) : null;
  }
}

/** Append tokens to an element; the first one of all can be reached by Tab, the others by arrows. */
export function appendTokens(element, tokens) {
  for (const token of tokens) {
    // blanks before a word have no colour: it would be torn where the line breaks
    const blanks = /^\s+(?=\S)/.exec(token.t)?.[0] ?? "";
    const text = token.e ? "" : token.t.slice(blanks.length);
    const span = h("span", { class: token.e ? "token end" : "token", "data-p": level(token.l), tabindex: element.querySelector(".token") ? -1 : 0 }, text);
    span.token = token;
    element.append(token.e ? "" : blanks, span);
  }
}

/** An element for tokens. */
export function tokenBox() {
  return h("div", {
    class: "tokens",
    role: "group",
    "aria-label": "Tokens of the answer; arrow keys go from one to the next",
    onkeydown: moved,
    onfocusin: (event) => show(event.target),
    onfocusout: hide,
    onpointerover: (event) => event.pointerType !== "touch" && show(event.target),
    onpointerout: hide,
  });
}

function moved(event) {
  if (event.key === "Escape" && !$("token-card").hidden) {
    event.stopPropagation();
    return hide();
  }
  const spans = [...event.currentTarget.querySelectorAll(".token")];
  const place = spans.indexOf(event.target);
  const next = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: spans.length - 1 }[event.key];
  if (place < 0 || spans[next] === undefined) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  spans[next].tabIndex = 0;
  spans[next].focus();
}

const percent = (logprob) => {
  const value = 100 * Math.exp(logprob);
  return value >= 9.95 ? `${value.toFixed(0)} %` : value >= 0.1 ? `${value.toFixed(1)} %` : "< 0.1 %";
};

/** A token's text where blanks can be seen. */
const visible = (text) => text.replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5").replaceAll(" ", "\u00b7") || "(nothing)";

function show(span) {
  if (!span.token) return;
  const card = $("token-card");
  const { t, l, a } = span.token;
  const rows = a.some(([text]) => text === t) ? a : [[t, l], ...a];
  card.replaceChildren(
    h("p", { class: "head" }, h("code", {}, visible(t)), h("span", {}, `${percent(l)}, log-probability ${l.toFixed(2)}`)),
    h("ol", {}, ...rows.map(([text, value]) => {
      const bar = h("i", { "aria-hidden": true });
      bar.style.width = `${Math.max(1, 100 * Math.exp(value))}%`;
      return h("li", { class: text === t ? "own" : null }, h("code", {}, visible(text)), h("b", {}, percent(value)), bar);
    })),
  );
  card.hidden = false;
  span.setAttribute("aria-describedby", "token-card");
  const place = span.getClientRects()[0];
  const { width, height } = card.getBoundingClientRect();
  const above = place.top - height - 6;
  card.style.left = `${Math.max(8, Math.min(place.left, document.documentElement.clientWidth - width - 8))}px`;
  card.style.top = `${above > 8 ? above : place.bottom + 6}px`;
}

function hide() {
  const card = $("token-card");
  card.hidden = true;
  for (const one of document.querySelectorAll("[aria-describedby=token-card]")) one.removeAttribute("aria-describedby");
}

document.addEventListener("scroll", hide, { capture: true, passive: true });
