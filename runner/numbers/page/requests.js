// The running and waiting requests: a row for each, with a bar for the prompt and a bar for the answer.

import { count, counted, duration, html, percent, rate, write } from "./text.js";

const PHASES = {
  queued: "waiting",
  prefill: "reading the prompt",
  grammar: "waiting for its grammar",
  decode: "answering",
};

/** Shows a row for each request. A request keeps its row between two calls of `draw`. */
export class Requests {
  #list;
  #none;
  #rows = new Map();

  constructor(list, none) {
    this.#list = list;
    this.#none = none;
  }

  draw(running) {
    const gone = new Set(this.#rows.keys());
    running.forEach((request, index) => {
      gone.delete(request.number);
      let row = this.#rows.get(request.number);
      if (!row) this.#rows.set(request.number, (row = new Row(request.number)));
      row.draw(request);
      if (this.#list.children[index] !== row.element) this.#list.insertBefore(row.element, this.#list.children[index]);
    });
    for (const number of gone) {
      this.#rows.get(number).element.remove();
      this.#rows.delete(number);
    }
    this.#none.hidden = running.length > 0;
  }
}

class Row {
  #phase = html("span", "phase");
  #age = html("span", "age");
  #cached = html("i", "cached");
  #read = html("i", "read");
  #written = html("i", "written");
  #prompt = html("span");
  #answer = html("span");

  constructor(number) {
    const bar = (...parts) => html("div", "bar", ...parts);
    const bars = html("div", "bars", bar(this.#cached, this.#read), bar(this.#written));
    bars.setAttribute("aria-hidden", "true");
    this.element = html(
      "li", "request",
      html("div", "line", html("b", "", `#${number}`), this.#phase, this.#age),
      bars,
      html("div", "line foot", this.#prompt, this.#answer),
    );
  }

  draw(request) {
    const { phase, prompt, cached, restored, prefilled, generated, max_tokens: most } = request;
    this.element.dataset.phase = phase;
    write(this.#phase, PHASES[phase] ?? phase);
    write(this.#age, duration(request.age_s));
    this.#cached.style.width = width(cached, prompt);
    this.#read.style.width = width(prefilled - cached, prompt);
    this.#written.style.width = width(generated, most);
    const read = phase === "prefill" && prompt ? `, ${percent(prefilled / prompt)} read` : "";
    write(this.#prompt, `${counted(prompt, "prompt token")}${cached ? `, ${count(cached)} cached` : ""}${restored ? ` (${count(restored)} from disk)` : ""}${read}`);
    write(this.#answer, answer(request));
  }
}

function answer({ phase, generated, max_tokens: most, tokens_per_s: speed, ttft_s: first }) {
  const pace = speed > 0 ? `${rate(speed)} tokens/s` : "";
  if (phase === "prefill") return pace;
  if (phase !== "decode") return "";
  const begun = first === null ? "" : `first after ${duration(first)}`;
  return [`${count(generated)}${most > 0 ? ` of ${count(most)}` : ""}`, pace, begun].filter(Boolean).join(", ");
}

const width = (part, total) => `${total > 0 ? Math.max(0, Math.min(100, (part / total) * 100)) : 0}%`;
