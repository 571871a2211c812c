// Formats numbers for people, and makes elements. No text is ever parsed as markup.

const SVG = "http://www.w3.org/2000/svg";
const whole = new Intl.NumberFormat("en");

/** Formats a whole number: `12,345`. */
export const count = (number) => whole.format(Math.round(number));

/** Formats a number with a noun: `1 node`, `2 nodes`. */
export const counted = (number, noun, nouns = `${noun}s`) => `${count(number)} ${number === 1 ? noun : nouns}`;

/** Formats bytes: `1.1 GB`, in powers of 1000, as the runner's messages do. */
export function bytes(number) {
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "KB"]]) {
    if (number >= size) return `${(number / size).toFixed(1)} ${unit}`;
  }
  return `${Math.round(number)} B`;
}

/** Formats a share: `83 %`. A share near 0 or 1 is not rounded to `0 %` or `100 %`. */
export function percent(share) {
  const value = share * 100;
  if (value > 99 && value < 100) return `${(Math.floor(value * 10) / 10).toFixed(1)} %`;
  return `${value > 0 && value < 1 ? "< 1" : Math.round(value)} %`;
}

/** Formats a number per second: `35.1`, or `123` without decimals from 100 on. */
export const rate = (number) => (number > 0 && number < 100 ? number.toFixed(1) : count(number));

/** Formats a duration: `38 ms`, `0.42 s`, `12 s`, `3 min 05 s`, `2 h 05 min`, `3 d 4 h`. */
export function duration(seconds) {
  if (seconds < 0.1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${pad(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${pad(Math.floor(s / 60) % 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor(s / 3600) % 24} h`;
}

const pad = (number) => String(number).padStart(2, "0");

/** Makes an HTML element with a class and children, which are elements or text. */
export function html(name, style = "", ...children) {
  const made = document.createElement(name);
  if (style) made.className = style;
  made.append(...children);
  return made;
}

/** Makes an SVG element with attributes and children. */
export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  set(made, attributes);
  made.append(...children);
  return made;
}

/** Sets those attributes of an element whose values differ. */
export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    const text = String(value);
    if (element.getAttribute(name) !== text) element.setAttribute(name, text);
  }
}

/** Replaces an element's text if it differs. Equal text is left alone, which keeps the user's selection. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Fills a <dl> with [name, value] rows. Reuses the elements of present rows. */
export function rows(list, pairs) {
  pairs.forEach(([name, value], index) => {
    const row = list.children[index] ?? list.appendChild(html("div", "", html("dt"), html("dd")));
    write(row.firstChild, name);
    write(row.lastChild, value);
  });
  while (list.children.length > pairs.length) list.lastChild.remove();
}

/** Returns a phrase about the part of a node that is on disk, or an empty text. */
export function onDisk({ start, end, stored, restored }) {
  if (restored) return ", brought from disk";
  return stored ? `, ${stored < end - start ? `${counted(stored, "token")} ` : ""}on disk` : "";
}
