// What the engine does: its pages, slots, queues and steps, as they are told a few times a second.

import { ApiError, ask, events } from "./api.js";
import { duration, h, shown } from "./dom.js";
import { Load } from "./load.js";
import { HOST_NAMES, PageMap } from "./pagemap.js";
import { Timeline } from "./timeline.js";

const RETRY_MS = 2000;
const WORK_S = 5;

// Places in the row of a slot.
const [SLOT, RANK, PROMPT, OUTPUT, COMPUTED, MAX, PAGES, CACHED, PREFILLS, PREEMPTED, AGE] = Array.from({ length: 11 }, (_, index) => index);

const TILES = [
  ["running", "Running", "sequences that have a slot"],
  ["waiting", "Waiting", "sequences without a slot"],
  ["generated", "Generated", "tokens a second, of the last five"],
  ["prefilled", "Prefilled", "prompt tokens computed a second, of the last five"],
  ["pages", "Pages in use", "share of the KV pages that requests own"],
  ["hits", "Cache hits", "share of the prompt tokens that the prefix cache had, since the start"],
  ["busy", "Device busy", "share of the last five seconds, at least"],
  ["mfu", "MFU", "operations of the last five seconds, as a share of what a device can do"],
  ["bandwidth", "Bandwidth", "bytes read in the last five seconds, as a share of what a device can read"],
  ["preempted", "Preempted", "sequences that lost a slot, since the start"],
];

export class EngineView {
  constructor(root, chat) {
    this.root = root;
    this.chat = chat;
    this.facts = null;
    this.shown = false;
    this.names = {};
    this.work = []; // [time, operations, bytes] of the last frames
    this.stream = null;
    this.map = new PageMap();
    this.map.nameOf = (slot) => this.nameOf(slot);
    this.host = new PageMap(HOST_NAMES, "Map of the KV pages in the host's memory", "host-detail");
    this.timeline = new Timeline();
    this.load = new Load();
    this.build();
    document.addEventListener("visibilitychange", () => this.update());
  }

  bind(facts) {
    this.facts = facts;
    for (const [name, limit] of [["mfu", facts.device_flops], ["bandwidth", facts.device_bytes]]) this.tiles.get(name).parentElement.hidden = !limit;
    this.load.bind(facts);
    this.update();
  }

  setShown(isShown) {
    this.shown = isShown;
    this.update();
    this.redraw();
  }

  redraw() {
    this.map.draw();
    this.host.draw();
    this.timeline.draw();
  }

  build() {
    this.tiles = new Map();
    const tiles = TILES.map(([name, label, help]) => {
      const value = h("dd", {}, "\u2013");
      this.tiles.set(name, value);
      return h("div", { class: "tile", title: help }, h("dt", {}, label), value);
    });
    this.status = h("p", { class: "banner", role: "status", hidden: true });
    this.slots = h("tbody");
    this.queues = h("ul", { class: "queues" });
    this.totals = h("dl", { class: "totals" });
    const table = h("table", {},
      h("caption", { class: "hidden" }, "Sequences that run"),
      h("thead", {}, h("tr", {}, ...["Slot", "Request", "Class", "Tokens", "Pages", "Age"].map((one) => h("th", { scope: "col" }, one)))), this.slots);
    this.hostCard = card("Host memory", this.host.element);
    this.hostCard.hidden = true; // no page leaves the device
    this.root.append(
      h("h2", { class: "hidden" }, "Engine"),
      this.status,
      h("dl", { class: "tiles" }, ...tiles),
      h("div", { class: "column" },
        card("Page pool", this.map.element),
        this.hostCard,
        card("Steps", this.timeline.element),
        card("Slots", h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of slots" }, table))),
      h("div", { class: "column" }, card("Try it", this.load.element), card("Queues", this.queues), card("Since the start", this.totals)),
    );
  }

  /** Watch while somebody looks, and not otherwise. */
  update() {
    const wanted = this.shown && this.facts !== null && !document.hidden;
    if (wanted && !this.stream) this.watch();
    if (!wanted && this.stream) {
      this.stream.abort();
      this.stream = null;
    }
  }

  async watch() {
    const stream = (this.stream = new AbortController());
    while (!stream.signal.aborted) {
      try {
        const response = await ask("engine/stream", { signal: stream.signal });
        for await (const event of events(response)) this.take(event);
        if (!stream.signal.aborted) this.setStatus("The server has ended the connection");
      } catch (error) {
        if (stream.signal.aborted) return;
        if (!(error instanceof ApiError) && error.name !== "TypeError") throw error;
        this.setStatus(error instanceof ApiError ? error.message : "The connection is lost");
        if (error.status === 401) {
          this.stream = null;
          return;
        }
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  take(event) {
    if (event.status) {
      const texts = { ok: "", loading: "The model is loading", restarting: "The engine has died and is started again", silent: "The engine says nothing", draining: "The server shuts down", dead: "The engine has stopped" };
      this.setStatus(texts[event.status] ?? event.status);
    } else if (event.names) {
      this.names = event.names; // of the frame that follows
    } else if (event.frame) {
      this.frame = event;
      this.map.take(event.pool);
      this.hostCard.hidden = !event.host.pages;
      this.host.take(event.host);
      this.timeline.take(event.bins, event.now, Boolean(event.pool.cells));
      this.showTiles();
      this.showQueues();
      this.showSlots();
      this.root.dataset.frames = event.frame;
    }
  }

  setStatus(text) {
    if (this.status.textContent !== text) this.status.textContent = text;
    this.status.hidden = !text;
  }

  /** Who holds a slot, as far as this browser or the server may say. */
  nameOf(slot) {
    const id = this.names[slot];
    if (id === undefined) return this.facts?.has_keys ? "another client" : "a request that has ended";
    for (const [request, title] of this.chat.titles) if (id.includes(request)) return `this chat, \u201c${title}\u201d`;
    if (id.includes("-page-load-")) return "the small load";
    return id;
  }

  showTiles() {
    const { counts, pool, slots, num_slots: numSlots } = this.frame;
    const rates = this.timeline.rates();
    const used = this.map.cells.reduce((sum, code) => sum + ((code & 3) >= 2), 0) / Math.max(1, this.map.cells.length);
    const values = {
      running: `${shown(slots.length)} / ${shown(numSlots)}`,
      waiting: shown(counts.waiting),
      generated: `${shown(rates.decode)} tok/s`,
      prefilled: `${shown(rates.prefill)} tok/s`,
      pages: `${shown(100 * used)} %`,
      hits: counts.queried ? `${shown((100 * counts.found) / counts.queried)} %` : "\u2013",
      busy: `${shown(100 * rates.busy)} %`,
      ...this.shares(),
      preempted: shown(counts.preempted),
    };
    for (const [name, value] of Object.entries(values)) this.tiles.get(name).textContent = value;
    const totals = [
      ["Requests finished", counts.finished], ["Requests refused", counts.refused], ["Prompt tokens", counts.prompt_tokens],
      ["Generated tokens", counts.generation_tokens], ["Steps", counts.steps], ["Programs compiled", counts.programs],
      ["Engine restarts", counts.restarts], ["KV pages", pool.pages], ["Tokens a page", counts.page_size],
    ];
    this.totals.replaceChildren(...totals.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, shown(value)))));
  }

  /** What was computed and read of late, of what the device can. */
  shares() {
    const { now, counts } = this.frame;
    if (!counts.work) return {};
    this.work = [...this.work.filter(([time]) => time > now - WORK_S && time < now), [now, ...counts.work]];
    const [[begin, flops, bytes]] = this.work;
    const share = (done, limit) => `${shown((100 * done) / Math.max(now - begin, 1e-3) / limit, 1)} %`;
    return { mfu: share(counts.work[0] - flops, this.facts.device_flops), bandwidth: share(counts.work[1] - bytes, this.facts.device_bytes) };
  }

  showSlots() {
    const focused = document.activeElement?.dataset?.slot;
    const rows = this.frame.slots.map((one) => this.slotRow(one));
    if (!this.frame.slots.some((one) => one[SLOT] === this.map.marked)) this.map.mark(null);
    this.slots.replaceChildren(...(rows.length ? rows : [h("tr", {}, h("td", { colspan: 6, class: "note" }, "Nothing runs."))]));
    if (focused !== undefined) this.slots.querySelector(`[data-slot="${CSS.escape(focused)}"]`)?.focus();
  }

  slotRow(one) {
    const total = Math.max(1, one[PROMPT] + one[MAX]);
    const bar = h("span", { class: "progress", "aria-hidden": "true" }, h("i", { class: "prompt" }), h("i", { class: "output" }));
    bar.firstChild.style.width = `${(100 * Math.min(one[COMPUTED], one[PROMPT])) / total}%`;
    bar.lastChild.style.width = `${(100 * one[OUTPUT]) / total}%`;
    const cached = one[CACHED] ? `, ${shown(one[CACHED])} of them cached` : "";
    const told = one[PREFILLS] ? `prefill ${shown(one[COMPUTED])} of ${shown(one[PROMPT])}` : `${shown(one[PROMPT])} + ${shown(one[OUTPUT])}`;
    const mark = (slot) => () => this.map.mark(slot);
    return h("tr", { onpointerenter: mark(one[SLOT]), onpointerleave: mark(null) },
      h("th", { scope: "row" }, h("button", { type: "button", class: "plain", "data-slot": one[SLOT], "aria-label": `Slot ${one[SLOT]}: show its pages`, onfocus: mark(one[SLOT]), onblur: mark(null) }, String(one[SLOT]))),
      h("td", { class: "who", title: this.nameOf(one[SLOT]) }, this.nameOf(one[SLOT])),
      h("td", {}, this.className(one[RANK])),
      h("td", { title: `prompt${cached}, and output of ${shown(one[MAX])} at most` }, bar, told),
      h("td", {}, shown(one[PAGES])),
      h("td", {}, duration(one[AGE]), one[PREEMPTED] ? h("small", {}, ` (preempted ${one[PREEMPTED]})`) : ""));
  }

  showQueues() {
    const { queues } = this.frame;
    const most = Math.max(1, ...queues.map(([, count]) => count));
    this.queues.replaceChildren(...(queues.length ? queues : [[null, 0, 0]]).map(([rank, count, oldest]) => {
      if (rank === null) return h("li", { class: "note" }, "Nobody waits.");
      const bar = h("i", { "aria-hidden": "true" });
      bar.style.width = `${(100 * count) / most}%`;
      return h("li", {}, h("span", {}, this.className(rank)), h("b", {}, shown(count)), h("small", {}, `the first for ${duration(oldest)}`), bar);
    }));
  }

  /** The name of a class: requests are told apart by length or priority, as the policy does. */
  className(rank) {
    const { policy, length_classes: bounds } = this.facts;
    if (policy === "priority") return `priority ${rank}`;
    if (policy === "length" && bounds.length) {
      if (rank >= bounds.length) return `${shown(bounds.at(-1))} tokens or more`;
      return `below ${shown(bounds[rank])} tokens`;
    }
    return "all";
  }
}

const card = (title, ...children) => h("section", { class: "card", "aria-label": title }, h("h3", {}, title), ...children);
