// Texts of prompts and others, cut to the little room of an edge.

const CHARACTER = 6.7;

const PADDING = 8;

/** The first of the texts that fits into this many pixels. */
export const fitting = (pixels, ...texts) => texts.find((text) => width(text) * CHARACTER <= pixels) ?? "";

/** As much of the text as fits. */
export function shortened(pixels, text) {
  const letters = Math.floor(pixels / CHARACTER);
  if (width(text) <= letters) return text;
  return letters > 2 ? `${cut(text, letters - 1)}…` : "";
}

/** The pixels that a text takes with some room around it. */
export const room = (text) => Math.ceil(width(text) * CHARACTER) + 2 * PADDING;

const wide = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\u{1f000}-\u{1ffff}]/u;

const width = (text) => [...text].reduce((sum, letter) => sum + (wide.test(letter) ? 2 : 1), 0);

function cut(text, room) {
  let used = 0;
  let kept = "";
  for (const letter of text) {
    used += wide.test(letter) ? 2 : 1;
    if (used > room) break;
    kept += letter;
  }
  return kept;
}

/** Text in one line; what would be invisible is shown by its picture. */
export const oneLine = (text) =>
  text.replace(/\r?\n/g, "⏎").replace(/\t/g, " ").replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, "·");
