// The page pool as a map: one cell a page, or a few pages where there are very many.

import { h, shown } from "./dom.js";

const CACHED = 1;
const USED = 2;
const SHARED = 3;
const NAMES = ["free", "cached", "in use", "shared"];
export const HOST_NAMES = ["free", "cached", "arriving"];
const TALLEST = 300;
const CELL = { least: 3, most: 18 };

export class PageMap {
  constructor(names = NAMES, label = "Map of the KV pages", detail = "map-detail") {
    this.names = names;
    this.cells = new Uint16Array(0);
    this.perCell = 1;
    this.numPages = 0;
    this.cursor = -1;
    this.marked = null; // the slot whose pages stand out
    this.nameOf = () => "";
    this.canvas = h("canvas", {
      class: "map", tabindex: 0, role: "application", "aria-label": `${label}; arrow keys go from page to page`,
      "aria-describedby": detail, onpointermove: (event) => this.point(event), onpointerleave: () => this.setCursor(-1),
      onpointerdown: (event) => this.point(event), onkeydown: (event) => this.moved(event), onblur: () => this.setCursor(-1),
    });
    this.swatches = names.map((name) => h("i", { class: `swatch ${name.replace(" ", "-")}` }));
    this.counts = names.map(() => h("b", {}, "0"));
    this.legend = h("ul", { class: "map-legend" }, ...names.map((name, state) => h("li", {}, this.swatches[state], `${name} `, this.counts[state])));
    this.detail = h("p", { id: detail, class: "note", "aria-live": "polite" });
    this.element = h("div", {}, this.legend, this.canvas, this.detail);
    new ResizeObserver(() => this.draw()).observe(this.element);
    this.setCursor(-1);
  }

  /** Take in the pool of a frame. */
  take(pool) {
    const count = Math.ceil(pool.pages / pool.per);
    this.numPages = pool.pages;
    this.perCell = pool.per;
    if (pool.cells) {
      this.cells = new Uint16Array(count);
      let place = 0;
      for (let index = 0; index < pool.cells.length; index += 2) {
        this.cells.fill(pool.cells[index + 1], place, (place += pool.cells[index]));
      }
    } else {
      for (let index = 0; index < pool.changed.length; index += 3) {
        const [begin, length, code] = pool.changed.slice(index, index + 3);
        this.cells.fill(code, begin, begin + length);
      }
    }
    const counts = [0, 0, 0, 0];
    for (const code of this.cells) counts[code & 3] += 1;
    this.names.forEach((_, state) => (this.counts[state].textContent = shown(counts[state] * this.perCell)));
    this.draw();
    this.tell();
  }

  /** Have the pages of a slot stand out; null for none. */
  mark(slot) {
    this.marked = slot;
    this.draw();
  }

  draw() {
    const { canvas, cells } = this;
    const width = this.element.clientWidth;
    if (!width || !cells.length) return;
    let size = CELL.most;
    while (size > CELL.least && Math.ceil(cells.length / Math.floor(width / size)) * size > TALLEST) size -= 1;
    this.columns = Math.floor(width / size);
    this.size = size;
    const height = Math.ceil(cells.length / this.columns) * size;
    const scale = devicePixelRatio || 1;
    if (canvas.width !== width * scale || canvas.height !== height * scale) {
      canvas.width = width * scale;
      canvas.height = height * scale;
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const colours = this.swatches.map((one) => getComputedStyle(one).color);
    const ink = getComputedStyle(canvas).color;
    const inner = size - (size > 4 ? 1.5 : size > 3 ? 1 : 0.5);
    cells.forEach((code, index) => {
      const state = code & 3;
      const owner = (code >> 2) - 1;
      const x = (index % this.columns) * size;
      const y = Math.floor(index / this.columns) * size;
      context.globalAlpha = this.marked !== null && owner !== this.marked ? 0.18 : state === USED ? [1, 0.72, 0.86, 0.6][owner & 3] : 1;
      context.fillStyle = colours[state];
      if (state === CACHED) {
        // told by its shape too: a triangle
        context.beginPath();
        context.moveTo(x, y + inner);
        context.lineTo(x, y);
        context.lineTo(x + inner, y + inner);
        context.fill();
      } else {
        context.fillRect(x, y, inner, inner);
      }
      if (state === SHARED && size > 5) {
        const dot = Math.max(2, inner / 3);
        context.fillStyle = ink;
        context.fillRect(x + (inner - dot) / 2, y + (inner - dot) / 2, dot, dot);
      }
    });
    context.globalAlpha = 1;
    if (this.cursor >= 0) {
      context.strokeStyle = ink;
      context.lineWidth = 2;
      context.strokeRect((this.cursor % this.columns) * size, Math.floor(this.cursor / this.columns) * size, inner, inner);
    }
  }

  point(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - left) / this.size);
    const index = Math.floor((event.clientY - top) / this.size) * this.columns + column;
    this.setCursor(column < this.columns && index < this.cells.length ? index : -1);
  }

  moved(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const next = Math.max(0, this.cursor) + (this.cursor < 0 ? 0 : step);
    if (next >= 0 && next < this.cells.length) this.setCursor(next);
  }

  setCursor(index) {
    this.cursor = index;
    this.draw();
    this.tell();
  }

  tell() {
    const code = this.cells[this.cursor];
    let text = "Point at a page, or go there by arrow keys, to see who holds it.";
    if (code !== undefined) {
      const begin = this.cursor * this.perCell + 1;
      const end = Math.min(this.numPages, begin + this.perCell - 1);
      const owner = (code >> 2) - 1;
      const holder = (code & 3) < USED || this.names !== NAMES ? "" : owner < 0 ? ", held for completions that wait" : `, slot ${owner}: ${this.nameOf(owner)}`;
      text = `${begin === end ? `Page ${begin}` : `Pages ${begin} to ${end}`}: ${this.names[code & 3]}${holder}`;
    } else if (this.perCell > 1) {
      text = `A cell stands for ${this.perCell} pages. ${text}`;
    }
    if (this.detail.textContent !== text) this.detail.textContent = text;
  }
}

