// Texts cut to the length of an edge in the picture of the trie.

const CHARACTER = 6.7;

const PADDING = 8;

/** Returns the first of the texts that fits into `pixels`, or an empty text. */
export const fitting = (pixels, ...texts) => texts.find((text) => width(text) * CHARACTER <= pixels) ?? "";

/** Returns the text, cut with "…" to fit into `pixels`. */
export function shortened(pixels, text) {
  const letters = Math.floor(pixels / CHARACTER);
  if (width(text) <= letters) return text;
  return letters > 2 ? `${cut(text, letters - 1)}…` : "";
}

/** Returns the width of a text in pixels, with a margin on both sides. */
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

/** Returns the text on one line, with visible signs in place of line breaks and invisible characters. */
export const oneLine = (text) =>
  text.replace(/\r?\n/g, "⏎").replace(/\t/g, " ").replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, "·");
