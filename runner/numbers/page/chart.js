// A chart of one quantity over the last ten minutes: a line over a filled area.

import { duration, html, svg, set, write } from "./text.js";
import { SPAN_S, STEP_S } from "./history.js";

const HEIGHT = 100;
const STEPS = SPAN_S / STEP_S;

/** Fills a <figure> with a caption (name, value and note) and a chart below. */
export class Chart {
  #area = svg("path", { class: "area" });
  #line = svg("path", { class: "line" });
  #bound = svg("path", { class: "bound" });
  #mark = svg("path", { class: "mark" });
  #value = html("span", "value");
  #note = html("span", "note");
  #top = html("span", "top");
  #picture;
  #show;
  #values = [];
  #texts = {};
  #pointed = null;

  /** `show` formats a value. */
  constructor(figure, name, show) {
    this.#show = show;
    this.#picture = svg(
      "svg",
      { viewBox: `0 0 ${STEPS} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      this.#area, this.#bound, this.#line, this.#mark,
    );
    const caption = html("figcaption", "", html("span", "name", name), this.#value, this.#note);
    const plot = html("div", "plot", this.#picture, this.#top);
    figure.append(caption, plot, html("div", "axis", html("span", "", "10 min ago"), html("span", "", "now")));
    plot.addEventListener("pointermove", (event) => this.#point(event));
    plot.addEventListener("pointerleave", () => this.#leave());
  }

  /** Draws `values`, from the oldest to now (null if unknown). `most` is the upper edge, `bound` the limit's line. */
  draw(values, { value, note, most, bound = null, label }) {
    this.#values = values;
    this.#texts = { value, note };
    const y = (number) => (HEIGHT * (1 - Math.min(number / (most || 1), 1))).toFixed(1);
    let line = "";
    let area = "";
    for (let from = 0; from < values.length; from++) {
      if (values[from] === null) continue;
      let to = from;
      while (to + 1 < values.length && values[to + 1] !== null) to++;
      let points = `${from} ${y(values[from])}`;
      for (let step = from + 1; step <= to; step++) points += `L${step} ${y(values[step])}`;
      if (to === from) points += `h${from ? -1 : 1}`; // makes a single value visible
      line += `M${points}`;
      area += `M${from} ${HEIGHT}L${points}L${Math.max(to, from)} ${HEIGHT}Z`;
      from = to;
    }
    set(this.#line, { d: line });
    set(this.#area, { d: area });
    set(this.#bound, { d: bound !== null && bound <= most ? `M0 ${y(bound)}H${STEPS}` : "" });
    set(this.#picture, { "aria-label": label });
    write(this.#top, this.#show(most).replace(".0 ", " "));
    this.#texts_shown();
  }

  #point(event) {
    const box = this.#picture.getBoundingClientRect();
    const step = Math.round(((event.clientX - box.left) / box.width) * STEPS);
    this.#pointed = Math.max(0, Math.min(STEPS, step));
    this.#texts_shown();
  }

  #leave() {
    this.#pointed = null;
    this.#texts_shown();
  }

  #texts_shown() {
    const step = this.#pointed;
    set(this.#mark, { d: step === null ? "" : `M${step} 0V${HEIGHT}` });
    if (step === null) {
      write(this.#value, this.#texts.value);
      write(this.#note, this.#texts.note);
      return;
    }
    const value = this.#values[step] ?? null;
    write(this.#value, value === null ? "–" : this.#show(value));
    write(this.#note, step === STEPS ? "now" : `${duration((STEPS - step) * STEP_S)} ago`);
  }
}

/** Returns the least of 1, 2, 5, 10, 20, 50, 100, ... that is not below `number`. */
export function rounded(number) {
  const power = 10 ** Math.floor(Math.log10(Math.max(number, 1)));
  return [1, 2, 5, 10].find((factor) => factor * power >= number) * power;
}
