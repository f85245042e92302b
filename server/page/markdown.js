// A little Markdown, as DOM nodes: paragraphs, headings, lists, quotes, code, bold, italic. Links and
// images stay text, and there is no way from a model's text to markup.

import { h } from "./dom.js";

const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|\*(?=[^\s*])([^*]*[^\s*])\*(?!\*)/g;
const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const DEEPEST = 8;
const LONGEST = 8000; // characters that an expression is tried on; longer lines and paragraphs stay as they are

const find = (expression, line) => (line.length <= LONGEST ? line.match(expression) : null);

/** The nodes of a text. */
export function markdown(text) {
  return blocks(text.split("\n"), 0);
}

function blocks(lines, depth) {
  const nodes = [];
  let place = 0;
  while (place < lines.length) {
    const line = lines[place];
    const fence = find(FENCE, line);
    if (fence) {
      const end = fenceEnd(lines, place + 1, fence[1]);
      nodes.push(codeBlock(lines.slice(place + 1, end).join("\n"), fence[2]));
      place = end + 1;
    } else if (!line.trim()) {
      place += 1;
    } else if (find(HEADING, line)) {
      const [, marks, title] = find(HEADING, line);
      nodes.push(h(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(title)));
      place += 1;
    } else if (find(RULE, line)) {
      nodes.push(h("hr"));
      place += 1;
    } else if (find(QUOTE, line) && depth < DEEPEST) {
      const inner = [];
      for (; place < lines.length && find(QUOTE, lines[place]); place += 1) inner.push(find(QUOTE, lines[place])[1]);
      nodes.push(h("blockquote", {}, ...blocks(inner, depth + 1)));
    } else if (find(ITEM, line) && depth < DEEPEST) {
      const [node, next] = list(lines, place, depth);
      nodes.push(node);
      place = next;
    } else {
      const begin = place;
      do place += 1;
      while (place < lines.length && lines[place].trim() && !startsBlock(lines[place]));
      nodes.push(h("p", {}, ...inline(lines.slice(begin, place).join("\n"))));
    }
  }
  return nodes;
}

const startsBlock = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((one) => find(one, line));

function fenceEnd(lines, place, mark) {
  // an answer that is not complete has fences that are not closed
  while (place < lines.length && !(lines[place].trim().startsWith(mark) && !lines[place].trim().slice(mark.length).trim())) place += 1;
  return place;
}

function codeBlock(text, language) {
  const code = h("code", {}, text);
  return h("pre", { "data-language": language || null, tabindex: 0, role: "region", "aria-label": language ? `${language} code` : "code" }, code);
}

/** A list, and the place behind it. */
function list(lines, place, depth) {
  const [, indent, mark] = find(ITEM, lines[place]);
  const ordered = /\d/.test(mark);
  const node = h(ordered ? "ol" : "ul", { start: ordered ? parseInt(mark, 10) : null });
  while (place < lines.length) {
    const item = find(ITEM, lines[place]);
    if (!item || item[1].length !== indent.length || /\d/.test(item[2]) !== ordered) break;
    const inner = [item[3]];
    place += 1;
    for (; place < lines.length; place += 1) {
      const line = lines[place];
      const inside = line.startsWith(`${indent}  `) || (!line.trim() && (lines[place + 1] ?? "").startsWith(`${indent}  `));
      if (!inside && (!line.trim() || startsBlock(line))) break;
      inner.push(inside ? line.slice(indent.length + 2) : line);
    }
    const nodes = blocks(inner, depth + 1);
    const only = nodes.length === 1 && nodes[0].tagName === "P";
    node.append(h("li", {}, ...(only ? nodes[0].childNodes : nodes)));
    while (place < lines.length && !lines[place].trim() && find(ITEM, lines[place + 1] ?? "")) place += 1;
  }
  return [node, place];
}

/** Code, bold and italic within a line. */
function inline(text, depth = 0) {
  if (depth >= DEEPEST || text.length > LONGEST) return [text];
  const nodes = [];
  let place = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > place) nodes.push(text.slice(place, match.index));
    const [whole, ticks, code, bold, italic] = match;
    if (ticks) nodes.push(h("code", {}, code.trim() || code));
    else if (bold !== undefined) nodes.push(h("strong", {}, ...inline(bold, depth + 1)));
    else nodes.push(h("em", {}, ...inline(italic, depth + 1)));
    place = match.index + whole.length;
  }
  if (place < text.length) nodes.push(text.slice(place));
  return nodes;
}
