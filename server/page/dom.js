// Small helpers around the DOM. Text always goes in as text: nothing here makes markup of strings.

/** The element with an id. */
export const $ = (id) => document.getElementById(id);

/**
 * Make an element: `h("p", { class: "note", onclick: f }, "text", child)`.
 * Properties whose names begin with "on" are listeners, `true` is an attribute without a value, and
 * those that are null, undefined or false are left out.
 */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const announcer = () => $("announcer");

/** Have a screen reader say something once it is free. */
export function announce(text) {
  announcer().textContent = text;
}

/** Says streamed text in whole sentences, and not more often than every few seconds. */
export class SpokenText {
  constructor(pause = 4000) {
    this.pause = pause;
    this.text = "";
    this.last = 0;
  }

  begin() {
    this.text = "";
    this.last = performance.now();
    announce("Answering");
  }

  add(text) {
    this.text += text;
    const now = performance.now();
    if (now - this.last < this.pause) return;
    const end = Math.max(...[". ", "? ", "! ", "\n"].map((one) => this.text.lastIndexOf(one)));
    if (end < 0) return;
    announce(this.text.slice(0, end + 1));
    this.text = this.text.slice(end + 1);
    this.last = now;
  }

  end(last) {
    announce(`${this.text} ${last}`.trim());
    this.text = "";
  }
}

/** Make buttons with role "tab" a list of tabs that arrow keys move in. */
export function tabs(buttons, chosen) {
  const choose = (button, focus) => {
    for (const one of buttons) {
      one.setAttribute("aria-selected", String(one === button));
      one.tabIndex = one === button ? 0 : -1;
    }
    if (focus) button.focus();
    chosen(button);
  };
  buttons.forEach((button, index) => {
    button.addEventListener("click", () => choose(button, false));
    button.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      choose(buttons[(index + step + buttons.length) % buttons.length], true);
    });
  });
  return (button) => choose(button, false);
}

/** A number for people: 12,345 or 0.12. */
export function shown(value, digits = 0) {
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Seconds for people. */
export function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  return `${Math.round(seconds / 60)} min`;
}
