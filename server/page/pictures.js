// Images that go along with the next message: dropped on the chat, or pasted.

import { announce, h } from "./dom.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const MOST_BYTES = 1 << 20; // of a file that is sent as it is
const MOST_PIXELS = 1344; // of the longer side of a larger one

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
  /** Shows what waits in `box`; takes what is dropped on `area` or pasted into `field`. */
  constructor(box, area, field, tell) {
    this.box = box;
    this.tell = tell;
    this.most = 0;
    this.urls = [];
    area.addEventListener("dragover", (event) => {
      if (this.most && [...event.dataTransfer.types].includes("Files")) event.preventDefault();
    });
    area.addEventListener("drop", (event) => this.take(event, event.dataTransfer.files));
    field.addEventListener("paste", (event) => this.take(event, event.clipboardData.files));
  }

  /** Tell how many images a message may have; 0: the model reads none. */
  bind(most) {
    this.most = most;
  }

  async take(event, files) {
    const images = [...files].filter((one) => KINDS.includes(one.type));
    if (!files.length || !this.most) return;
    event.preventDefault();
    if (!images.length) return this.tell("Only images can be sent: PNG, JPEG, WebP, GIF or BMP.");
    for (const file of images) {
      try {
        const url = await readImage(file);
        if (this.urls.length >= this.most) return this.tell(`At most ${this.most} images go along with a message.`);
        this.urls.push(url);
        this.show();
        announce("Image added");
      } catch {
        this.tell(`${file.name}: no image that this browser can read.`);
      }
    }
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

/** A file's data URL; of a large one that of a smaller image. */
async function readImage(file) {
  if (file.size <= MOST_BYTES) return dataUrl(file);
  const whole = await createImageBitmap(file);
  const scale = Math.min(1, MOST_PIXELS / Math.max(whole.width, whole.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(whole.width * scale));
  canvas.height = Math.max(1, Math.round(whole.height * scale));
  canvas.getContext("2d").drawImage(whole, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
