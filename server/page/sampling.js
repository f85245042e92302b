// The panel of sampling parameters and constraints, and the fields of a request that it stands for.

import { $, h } from "./dom.js";

const KEY = "jaxserve.sampling";

// name, label, least, most, step, what it does
const NUMBERS = [
  ["temperature", "Temperature", 0, 2, 0.1, "0 takes the most likely token each time"],
  ["top_p", "Top p", 0.01, 1, 0.01, "the likeliest tokens that make up this share"],
  ["top_k", "Top k", 0, 100000, 1, "so many of the likeliest tokens; 0: all"],
  ["min_p", "Min p", 0, 1, 0.01, "at least this share of the likeliest token's probability"],
  ["max_tokens", "Max tokens", 1, 1000000, 1, "of the answer"],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1, "on tokens that have been generated"],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1, "the same, for each time"],
  ["repetition_penalty", "Repetition penalty", 0.01, 10, 0.05, "divides the logits of tokens that came before; 1: none"],
  ["seed", "Seed", -9007199254740991, 9007199254740991, 1, "the same seed gives the same answer"],
];

const KINDS = [
  ["text", "Text"],
  ["json", "Any JSON object"],
  ["schema", "JSON that fits a schema"],
  ["regex", "A regular expression"],
  ["choice", "One of these lines"],
];

const EXAMPLES = {
  schema: JSON.stringify({ type: "object", properties: { sum: { type: "integer" } }, required: ["sum"], additionalProperties: false }, null, 2),
  regex: "(yes|no), because [a-z ]+\\.",
  choice: "yes\nno",
};

/** What the user chose; `null` leaves a parameter to the server. */
export class Sampling {
  constructor(panel) {
    this.values = { kind: "text", ...read() };
    this.inputs = new Map();
    panel.append(...this.build());
    this.showKind();
  }

  /** Tell what the server can do. */
  bind(facts) {
    this.system.closest("label").hidden = !facts.chat;
    $("structure").hidden = !facts.structured_outputs;
    this.limits = facts;
  }

  build() {
    this.system = h("textarea", { rows: 3, id: "system", placeholder: "None" });
    const numbers = NUMBERS.map(([name, label, min, max, step, help]) => {
      const input = h("input", { type: "number", id: `s-${name}`, min, max, step: step === 1 ? 1 : "any", placeholder: "default", inputmode: "decimal", title: help, oninput: () => this.changed() });
      input.value = this.values[name] ?? "";
      this.inputs.set(name, input);
      return h("label", { for: `s-${name}` }, h("span", {}, label), input, h("small", {}, help));
    });
    this.stop = h("input", { id: "s-stop", placeholder: "none", oninput: () => this.changed(), spellcheck: "false" });
    this.stop.value = this.values.stop ?? "";
    this.kind = h("select", { id: "s-kind", onchange: () => this.changed() }, ...KINDS.map(([name, label]) => h("option", { value: name }, label)));
    this.kind.value = this.values.kind;
    this.detail = h("textarea", { id: "s-detail", rows: 8, class: "mono", spellcheck: "false", "aria-describedby": "s-problem", oninput: () => this.changed() });
    this.problem = h("p", { id: "s-problem", class: "problem", role: "alert" });
    return [
      h("h2", {}, "Settings"),
      h("label", { for: "system", class: "wide" }, h("span", {}, "System prompt"), this.system),
      h("fieldset", { class: "numbers" }, h("legend", {}, "Sampling"), ...numbers,
        h("label", { for: "s-stop" }, h("span", {}, "Stop string"), this.stop, h("small", {}, "ends the answer before it"))),
      h("fieldset", { id: "structure" }, h("legend", {}, "Structured output"),
        h("label", { for: "s-kind", class: "wide" }, h("span", {}, "The answer is"), this.kind),
        h("label", { for: "s-detail", class: "wide", id: "s-detail-label" }, h("span", {}, ""), this.detail), this.problem),
      h("div", { class: "row" }, h("button", { type: "button", onclick: () => this.reset() }, "Back to defaults")),
    ];
  }

  changed() {
    const kind = this.kind.value;
    if (kind !== this.values.kind) {
      this.values.kind = kind;
      this.showKind();
    } else if (EXAMPLES[kind] !== undefined) {
      this.values[kind] = this.detail.value;
    }
    for (const [name, input] of this.inputs) this.values[name] = input.value === "" ? null : Number(input.value);
    this.values.stop = this.stop.value || null;
    try {
      localStorage.setItem(KEY, JSON.stringify(this.values));
    } catch {
      // storage is full: the settings hold as long as the page is open
    }
    this.check();
  }

  showKind() {
    const { kind } = this.values;
    const label = $("s-detail-label");
    label.hidden = EXAMPLES[kind] === undefined;
    if (label.hidden) return;
    label.firstChild.textContent = { schema: "JSON schema", regex: "Expression", choice: "Lines" }[kind];
    this.detail.rows = kind === "regex" ? 2 : 8;
    this.detail.value = this.values[kind] ?? EXAMPLES[kind];
    this.check();
  }

  /** What is wrong with the constraint, or nothing. */
  check() {
    let problem = "";
    if (this.values.kind === "schema") {
      try {
        JSON.parse(this.detail.value);
      } catch (error) {
        problem = `This is no JSON: ${error.message}`;
      }
    }
    if (this.problem.textContent !== problem) this.problem.textContent = problem;
    return problem;
  }

  reset() {
    for (const input of this.inputs.values()) input.value = "";
    this.stop.value = "";
    this.kind.value = "text";
    this.values = { kind: "text" };
    this.changed();
    this.showKind();
  }

  /** The fields of a request. Raises Error if one is out of its range. */
  fields() {
    const found = {};
    for (const [name, label] of NUMBERS) {
      const input = this.inputs.get(name);
      if (!input.validity.valid) throw new Error(`${label} has to be a number from ${input.min} to ${input.max}`);
      if (input.value !== "") found[name] = Number(input.value);
    }
    if (this.stop.value) found.stop = [this.stop.value];
    const problem = this.check();
    if (problem) throw new Error(problem);
    return { ...found, ...this.constraint() };
  }

  constraint() {
    const { kind } = this.values;
    if (!this.limits?.structured_outputs) return {};
    const detail = this.detail.value;
    switch (kind) {
      case "json":
        return { response_format: { type: "json_object" } };
      case "schema":
        return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(detail) } } };
      case "regex":
        return { structured_outputs: { regex: detail } };
      case "choice":
        return { structured_outputs: { choice: detail.split("\n").filter((line) => line) } };
      default:
        return {};
    }
  }
}

function read() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? {};
  } catch {
    return {};
  }
}
