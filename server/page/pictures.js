// Images that go along with the next message: dropped on the chat, or pasted.

import { announce, h } from "./dom.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const MOST_EXACT = 1 << 19; // characters of a PNG; what is larger becomes a JPEG
const MOST_PIXELS = 1344; // of the longer side

/** The content of a message as the server takes it: text, or images before text. */
export function content(text, images) {
  if (!images?.length) return text;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

/** The same messages with images that are not written out, for the eye. */
export function shortened(messages) {
  const short = (url) => url.replace(/(;base64,).*/s, "$1...");
  return messages.map((one) => (one.images ? { ...one, images: one.images.map(short) } : one));
}

/** Small views of images. */
export function views(images) {
  return images.map((url) => h("img", { class: "picture", src: url, alt: "Image" }));
}

export class Pictures {
  /**
   * Shows what waits in `box`; takes what is dropped on `area` or pasted into `field`.
   * `held` says how many images the conversation has, and `busy` is called when `reading` has changed.
   */
  constructor(box, area, field, tell, held = () => 0, busy = () => {}) {
    this.box = box;
    this.tell = tell;
    this.held = held;
    this.busy = busy;
    this.reading = 0;
    this.most = 0;
    this.urls = [];
    area.addEventListener("dragover", (event) => {
      if (this.most && [...event.dataTransfer.types].includes("Files")) event.preventDefault();
    });
    area.addEventListener("drop", (event) => this.take(event, event.dataTransfer.files));
    field.addEventListener("paste", (event) => this.take(event, event.clipboardData.files));
  }

  /** Tell how many images a conversation may have; 0: the model reads none. */
  bind(most) {
    this.most = most;
  }

  async take(event, files) {
    const images = [...files].filter((one) => KINDS.includes(one.type));
    if (!files.length || !this.most) return;
    event.preventDefault();
    if (!images.length) return this.tell("Only images can be sent: PNG, JPEG, WebP, GIF or BMP.");
    this.reading += 1;
    this.busy();
    try {
      for (const file of images) await this.add(file);
    } finally {
      this.reading -= 1;
      this.busy();
    }
  }

  async add(file) {
    let url;
    try {
      url = await readImage(file);
    } catch {
      return this.tell(`${file.name}: no image that this browser can read.`);
    }
    if (!this.hasRoom(1)) return;
    this.urls.push(url);
    this.show();
    announce("Image added");
  }

  /** Whether what waits, and so many more, fit into the conversation that is shown now; if not, the user is told. */
  hasRoom(more = 0) {
    const waiting = this.urls.length + more;
    if (!waiting || waiting + this.held() <= this.most) return true;
    this.tell(`At most ${this.most} images go along with a conversation.`);
    return false;
  }

  /** What waits, which waits no more. */
  taken() {
    const urls = this.urls;
    this.urls = [];
    this.show();
    return urls;
  }

  show() {
    this.box.hidden = !this.urls.length;
    this.box.replaceChildren(...this.urls.map((url, index) =>
      h("span", { class: "waiting" }, ...views([url]),
        h("button", { type: "button", class: "icon small", "aria-label": `Remove image ${index + 1}`, title: "Remove", onclick: () => this.drop(index) }, "\u00d7"))));
  }

  drop(index) {
    this.urls.splice(index, 1);
    this.show();
  }
}

/** The data URL of a file's picture, one frame, small enough to be sent and kept. */
async function readImage(file) {
  const whole = await createImageBitmap(file);
  const scale = Math.min(1, MOST_PIXELS / Math.max(whole.width, whole.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(whole.width * scale));
  canvas.height = Math.max(1, Math.round(whole.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // behind what can be seen through
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(whole, 0, 0, canvas.width, canvas.height);
  whole.close();
  const exact = file.type === "image/jpeg" ? "" : canvas.toDataURL("image/png");
  return exact && exact.length <= MOST_EXACT ? exact : canvas.toDataURL("image/jpeg", 0.9);
}
