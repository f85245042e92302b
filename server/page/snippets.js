// A request as code. The key is never in it: both programs read it from the environment.

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

// Fields that OpenAI's client knows by name; the others travel in `extra_body`.
const KNOWN = new Set([
  "model", "messages", "prompt", "temperature", "top_p", "max_tokens", "presence_penalty", "frequency_penalty",
  "seed", "stop", "stream", "stream_options", "logprobs", "top_logprobs", "response_format",
]);

/** As a curl command. */
export function curl(url, body, hasKey) {
  const lines = [`curl ${quoted(url)}`, "-H 'Content-Type: application/json'"];
  if (hasKey) lines.push('-H "Authorization: Bearer $JAXSERVE_API_KEY"');
  if (body.stream) lines.push("--no-buffer");
  lines.push(`-d ${quoted(JSON.stringify(body, null, 2))}`);
  return lines.join(" \\\n  ");
}

/** As a Python program with OpenAI's client. */
export function python(base, body, hasKey) {
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !KNOWN.has(name)));
  const fields = Object.entries(body).filter(([name]) => KNOWN.has(name) && name !== "stream_options");
  const key = hasKey ? 'os.environ["JAXSERVE_API_KEY"]' : '"none"';
  const lines = fields.map(([name, value]) => `    ${name}=${literal(value, 1)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra, 1)},`);
  const call = body.messages ? "chat.completions" : "completions";
  const piece = body.messages ? 'chunk.choices[0].delta.content or ""' : "chunk.choices[0].text";
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(base)}, api_key=${key})`,
    `chunks = client.${call}.create(`,
    ...lines,
    ")",
    "for chunk in chunks:",
    "    if chunk.choices:",
    `        print(${piece}, end="", flush=True)`,
    "print()",
    "",
  ].join("\n");
}

/** A JSON value as Python writes it. */
function literal(value, depth = 0) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "number") return String(value);
  if (typeof value === "string") {
    // what JSON leaves as it is but ends a line to Python is escaped
    return JSON.stringify(value).replace(/[\u007f-\u009f\u2028\u2029]/g, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);
  }
  const inner = "    ".repeat(depth + 1);
  const outer = "    ".repeat(depth);
  const items = Array.isArray(value)
    ? value.map((one) => literal(one, depth + 1))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, depth + 1)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const line = `${open}${items.join(", ")}${close}`;
  if (line.length + outer.length < 80 && !line.includes("\n")) return line;
  return `${open}\n${items.map((item) => `${inner}${item},\n`).join("")}${outer}${close}`;
}
