// The last minute of steps: rows that were computed, and how busy the device was.

import { h, shown } from "./dom.js";

const SLICE_S = 0.1;
const KEPT = 600; // slices
const ROWS_HEIGHT = 120;
const BUSY_HEIGHT = 40;
const GAP = 14;
const LEFT = 44;
const DELAY = 5; // slices at the end that are not complete yet

export class Timeline {
  constructor() {
    this.slices = new Map(); // index -> [steps, decode, prefill, busy, decode tokens, prefill tokens]
    this.now = 0;
    this.swatches = Object.fromEntries(["decode", "prefill", "busy"].map((name) => [name, h("i", { class: `swatch ${name}` })]));
    this.canvas = h("canvas", { class: "timeline", role: "img", "aria-label": "Rows of the last minute's steps" });
    this.summary = h("p", { class: "note" });
    this.element = h("div", {},
      h("ul", { class: "map-legend" },
        h("li", {}, this.swatches.decode, "decode rows"), h("li", {}, this.swatches.prefill, "prefill rows"), h("li", {}, this.swatches.busy, "device busy")),
      this.canvas, this.summary);
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  /** Take in the slices of a frame; whole: all there are. */
  take(slices, now, whole) {
    if (whole) this.slices.clear();
    for (const [index, ...values] of slices) {
      const known = this.slices.get(index);
      this.slices.set(index, known ? known.map((one, place) => one + values[place]) : values);
    }
    this.now = Math.floor(now / SLICE_S);
    for (const index of this.slices.keys()) if (index < this.now - KEPT) this.slices.delete(index);
    this.draw();
    const { steps, decode, prefill, busy } = this.rates();
    this.summary.textContent = `Last five seconds: ${shown(steps, 1)} steps, ${shown(decode)} tokens by decode and ${shown(prefill)} by prefill a second; busy ${shown(100 * busy)} %.`;
    this.canvas.setAttribute("aria-label", this.summary.textContent);
  }

  /** What the last seconds had, a second. */
  rates(seconds = 5) {
    const sums = [0, 0, 0, 0, 0, 0];
    const count = seconds / SLICE_S;
    for (let index = this.now - count - DELAY; index < this.now - DELAY; index += 1) {
      this.slices.get(index)?.forEach((one, place) => (sums[place] += one));
    }
    return { steps: sums[0] / seconds, busy: Math.min(1, sums[3] / seconds), decode: sums[4] / seconds, prefill: sums[5] / seconds };
  }

  draw() {
    const width = this.element.clientWidth;
    if (!width) return;
    const height = ROWS_HEIGHT + GAP + BUSY_HEIGHT + 18;
    const scale = devicePixelRatio || 1;
    const { canvas } = this;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const colour = Object.fromEntries(Object.entries(this.swatches).map(([name, one]) => [name, getComputedStyle(one).color]));
    const { color: ink, borderTopColor: line } = getComputedStyle(canvas);

    const together = Math.max(1, Math.round(KEPT / ((width - LEFT) / 2.5))); // slices of a column
    const end = Math.floor((this.now - DELAY) / together) * together;
    const columns = [];
    for (let begin = end - KEPT; begin < end; begin += together) {
      const sum = [0, 0, 0];
      for (let index = begin; index < begin + together; index += 1) {
        const one = this.slices.get(index);
        if (one) for (let place = 0; place < 3; place += 1) sum[place] += one[place + 1];
      }
      columns.push(sum.map((one) => one / (SLICE_S * together)));
    }
    const most = nice(Math.max(1, ...columns.map(([decode, prefill]) => decode + prefill)));
    const step = (width - LEFT) / columns.length;

    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const share of [0, 0.5, 1]) {
      const y = Math.round(ROWS_HEIGHT * (1 - share)) + 6.5;
      grid(context, line, LEFT, width, y);
      context.fillStyle = ink;
      context.fillText(shown(most * share, most * share % 1 ? 1 : 0), LEFT - 6, y);
    }
    const base = ROWS_HEIGHT + GAP + 6;
    grid(context, line, LEFT, width, base + BUSY_HEIGHT + 0.5);
    grid(context, line, LEFT, width, base + 0.5);
    context.fillStyle = ink;
    context.fillText("100 %", LEFT - 6, base);
    columns.forEach(([decode, prefill, busy], place) => {
      const x = LEFT + place * step;
      const low = (ROWS_HEIGHT * decode) / most;
      const high = (ROWS_HEIGHT * prefill) / most;
      context.fillStyle = colour.decode;
      context.fillRect(x, ROWS_HEIGHT + 6 - low, step + 0.2, low);
      context.fillStyle = colour.prefill;
      context.fillRect(x, ROWS_HEIGHT + 6 - low - high, step + 0.2, high);
      context.fillStyle = colour.busy;
      const share = BUSY_HEIGHT * Math.min(1, busy);
      context.fillRect(x, base + BUSY_HEIGHT - share, step + 0.2, share);
    });
    context.textAlign = "center";
    context.textBaseline = "bottom";
    context.fillStyle = ink;
    for (const seconds of [60, 40, 20]) context.fillText(`${seconds} s ago`, Math.max(LEFT + 26, width - (seconds / 60) * (width - LEFT)), height);
    context.textAlign = "right";
    context.fillText("now", width, height);
  }
}

function grid(context, colour, left, right, y) {
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(left, y);
  context.lineTo(right, y);
  context.stroke();
}

/** A round number that is not smaller. */
function nice(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.6, 2, 3, 4, 6, 8, 10].map((one) => one * unit).find((one) => one >= value - 1e-9);
}
