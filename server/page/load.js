// A small synthetic load: some prompts that share a beginning, sent by a few workers.

import { ApiError, ask } from "./api.js";
import { h, shown } from "./dom.js";

const WORKERS = 4;
const ROUNDS = 3;
const MOST_PROMPTS = 12; // of a request
const BEGINNING = "The following list was read by several people, who sorted it, counted it and wrote down what they found. ";

export class Load {
  constructor() {
    this.running = null;
    this.facts = null;
    this.button = h("button", { type: "button", class: "primary", onclick: () => this.toggle(), disabled: true }, "Send a small load");
    this.result = h("p", { class: "note", role: "status" });
    this.element = h("div", {},
      h("p", { class: "note" }, `${WORKERS} clients send ${ROUNDS} requests each, with a few prompts of different lengths that begin alike.`),
      h("div", { class: "row" }, this.button), this.result);
  }

  bind(facts) {
    this.facts = facts;
    this.button.disabled = false;
  }

  toggle() {
    if (this.running) this.running.abort();
    else this.run();
  }

  async run() {
    this.running = new AbortController();
    const { signal } = this.running;
    this.button.textContent = "Stop";
    this.result.textContent = "Running";
    const total = { tokens: 0, prompts: 0, refused: 0 };
    const begin = performance.now();
    let problem = "";
    try {
      await Promise.all(Array.from({ length: WORKERS }, (_, worker) => this.work(worker, total, signal)));
    } catch (error) {
      if (!signal.aborted && !(error instanceof ApiError)) throw error;
      problem = signal.aborted ? "Stopped. " : `${error.message}. `;
      this.running.abort();
    } finally {
      const seconds = (performance.now() - begin) / 1000;
      const refused = total.refused ? ` ${total.refused} requests were refused at first, since too much waited.` : "";
      this.result.textContent = `${problem}${shown(total.prompts)} completions, ${shown(total.tokens)} tokens in ${shown(seconds, 1)} s: ${shown(total.tokens / seconds)} tok/s.${refused}`;
      this.running = null;
      this.button.textContent = "Send a small load";
    }
  }

  async work(worker, total, signal) {
    const { slots, context, models } = this.facts;
    const count = Math.max(1, Math.min(MOST_PROMPTS, Math.round((1.25 * slots) / WORKERS)));
    for (let round = 0; round < ROUNDS; round += 1) {
      const prompt = Array.from({ length: count }, (_, index) => this.prompt(worker * count + index + round));
      const max_tokens = Math.max(1, Math.min(24 + 16 * ((worker + round) % 4), Math.floor(context / 4)));
      const body = { model: models[0], prompt, max_tokens, temperature: 1, ignore_eos: true };
      const answer = await this.ask(body, total, signal);
      total.tokens += answer.usage.completion_tokens;
      total.prompts += answer.choices.length;
    }
  }

  /** The answer; a server that has too much to do is asked again after the time that it says. */
  async ask(body, total, signal) {
    for (let attempt = 0; ; attempt += 1) {
      try {
        return await (await ask("v1/completions", { body, signal, requestId: "page-load" })).json();
      } catch (error) {
        if (!(error instanceof ApiError) || error.status !== 503 || attempt === 5) throw error;
        total.refused += 1;
        await new Promise((resolve) => setTimeout(resolve, 1000 * (Number(error.retryAfter) || 1)));
        signal.throwIfAborted();
      }
    }
  }

  prompt(number) {
    const words = Math.min(8 + ((number * 7) % 40), Math.floor(this.facts.context / 16));
    const list = Array.from({ length: words }, (_, index) => (number * 31 + index * 17) % 100).join(", ");
    const beginning = this.facts.context < 200 ? "" : BEGINNING;
    return `${beginning}${list}`;
  }
}
