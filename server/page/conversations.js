// Conversations in the browser's storage, each under a key of its own.

const INDEX = "jaxserve.conversations";
const ONE = "jaxserve.conversation.";
const CHOSEN = "jaxserve.chosen";

/** Everything that was said, newest conversation first. Nothing of it leaves the browser by itself. */
export class Conversations {
  constructor() {
    this.index = read(INDEX, []);
    this.waiting = null;
    this.isFull = false; // it was at the last try
    const last = localStorage.getItem(CHOSEN);
    const known = this.index.find((one) => one.id === last) ?? this.index[0];
    this.current = known ? this.load(known.id) : this.make();
    window.addEventListener("pagehide", () => this.save());
  }

  make() {
    return { id: crypto.randomUUID ? crypto.randomUUID() : fallbackId(), title: "", created: Date.now(), system: "", messages: [] };
  }

  load(id) {
    const found = read(ONE + id, null) ?? { ...this.make(), id };
    for (const message of found.messages) {
      // an answer that came while its conversation was left, or the page closed
      if (message.role === "assistant" && !message.stats) Object.assign(message, { finish: "stopped", stats: { ttft: null, rate: null, tokens: null, total: null } });
    }
    return found;
  }

  /** Go to a conversation, or to a new one for null. */
  choose(id) {
    this.save();
    this.current = id === null ? this.make() : this.load(id);
    store(CHOSEN, this.current.id);
  }

  remove(id) {
    localStorage.removeItem(ONE + id);
    this.index = this.index.filter((one) => one.id !== id);
    store(INDEX, JSON.stringify(this.index));
    if (this.current.id === id) {
      clearTimeout(this.waiting);
      this.waiting = null;
      this.current = this.index.length ? this.load(this.index[0].id) : this.make();
    }
  }

  /** Images of the current one. */
  get numImages() {
    return this.current.messages.reduce((sum, one) => sum + (one.images?.length ?? 0), 0);
  }

  /** Write the current one soon; streams change it many times a second. */
  changed() {
    if (this.isFull) return; // until its answer has come, or it is left
    this.waiting ??= setTimeout(() => this.save(), 1000);
  }

  /** Write it now; returns whether there was room. An empty one is not written. */
  save() {
    clearTimeout(this.waiting);
    this.waiting = null;
    const { id, title, created, messages } = this.current;
    if (!messages.length) return true;
    if (!this.index.some((one) => one.id === id)) this.index.unshift({ id, title, created });
    const entry = this.index.find((one) => one.id === id);
    entry.title = title;
    this.isFull = !this.write(this.current);
    if (!this.isFull) return true;
    // images are large: without those of this one the others stay as they are
    if (this.numImages && this.write(withoutImages(this.current))) return false;
    // log-probabilities are the most of it, and what is missed least
    for (const { id: other } of [...this.index].reverse()) {
      const one = other === id ? this.current : this.load(other);
      for (const message of one.messages) delete message.tokens;
      if (other !== id) store(ONE + other, JSON.stringify(one));
      if (this.write(withoutImages(this.current))) return !this.numImages;
    }
    return false;
  }

  write(conversation) {
    return store(INDEX, JSON.stringify(this.index)) && store(ONE + conversation.id, JSON.stringify(conversation)) && store(CHOSEN, conversation.id);
  }
}

function withoutImages(conversation) {
  return { ...conversation, messages: conversation.messages.map(({ images, ...rest }) => rest) };
}

function fallbackId() {
  // browsers have randomUUID on secure origins only
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (one) => one.toString(16).padStart(2, "0")).join("");
}

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise; // somebody else wrote it
  }
}

function store(key, text) {
  try {
    localStorage.setItem(key, text);
    return true;
  } catch {
    return false; // full
  }
}
