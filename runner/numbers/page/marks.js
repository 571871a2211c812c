// The marks in the picture of the trie: one for each drawn node, and one for the nodes left out in a place.

import { fitting, oneLine, shortened } from "./label.js";
import { bytes, count, counted, onDisk, set, svg, write } from "./text.js";

export const ROW = 50;
export const TOP = 8;
const OLD_USES = 64;
const FRAME = 17; // the width of the sign for media, with a gap
const DISK = 15; // the width of the sign for the disk, with a gap

/** Returns the y of the middle of an item's edge. */
export const middle = (item) => TOP + item.row * ROW + 26;

const levels = (item) => (item.from ? levels(item.from) + 1 : 1);

/** The mark for a node: a bar in three parts (live, paged out and missing layers), its text above, its bytes below. */
export class Edge {
  #parts = ["live", "paged", "missing"].map((kind) => svg("rect", { class: `part ${kind}` }));
  #frame = svg("rect", { class: "frame" });
  #point = svg("path", { class: "point" });
  #photo = svg("path", { class: "photo" });
  #disk = svg("path");
  #name = svg("text", { class: "name" });
  #size = svg("text", { class: "size" });
  #area = svg("rect", { class: "hit" });
  #hint = svg("title");

  constructor(key) {
    this.element = svg(
      "g", { class: "edge", role: "treeitem", "data-key": key }, this.#hint,
      ...this.#parts, this.#frame, this.#point, this.#photo, this.#disk, this.#name, this.#size, this.#area,
    );
  }

  draw(item, chosen) {
    const { node, x, length, thickness } = item;
    const y = middle(item) - thickness / 2;
    const layers = Math.max(1, node.layers);
    const shares = [node.live_layers, node.paged_layers, node.missing_layers].map((number) => number / layers);
    let left = x;
    this.#parts.forEach((part, index) => {
      const wide = length * Math.min(1, Math.max(0, shares[index]));
      set(part, { x: left.toFixed(1), y: y.toFixed(1), width: wide.toFixed(1), height: thickness.toFixed(1) });
      left += wide;
    });
    const box = { y: (y - 0.5).toFixed(1), width: length.toFixed(1), height: (thickness + 1).toFixed(1) };
    set(this.#frame, { x: x.toFixed(1), ...box, rx: 2 });
    const tip = x + length;
    const half = thickness / 2 + 3;
    set(this.#point, { d: node.restore_point ? `M${tip} ${middle(item) - half}V${middle(item) + half}` : "" });
    const tokens = node.end - node.start;
    set(this.#photo, { d: node.media ? photo(x + 0.5, y - 13.5) : "" });
    const kept = node.stored > 0 || node.restored;
    set(this.#disk, {
      d: kept ? disk(x + 0.5 + (node.media ? FRAME : 0), y - 14.5) : "",
      class: `disk${node.restored ? " restored" : ""}${node.stored < tokens ? " part" : ""}`,
    });
    const indent = (node.media ? FRAME : 0) + (kept ? DISK : 0);
    const room = length + 6 - indent;
    const name = node.text ? shortened(room, oneLine(node.text)) : fitting(room, counted(tokens, "token"), count(tokens));
    put(this.#name, x + indent, y - 5, name);
    put(this.#size, x, y + thickness + 12, fitting(length + 6, bytes(node.bytes)));
    set(this.#area, { x: x - 4, y: middle(item) - 22, width: length + 8, height: 46 });
    const uses = Math.min(node.idle_uses, OLD_USES) / OLD_USES;
    this.element.style.setProperty("--fresh", (1 - 0.55 * uses).toFixed(2));
    const told = `${node.text ? `${oneLine(node.text)}: ` : ""}tokens ${count(node.start)} to ${count(node.end)}, ` +
      `${bytes(node.bytes)}${node.media ? `, ${counted(node.media, "media item")}` : ""}${onDisk(node)}${node.locks ? ", in use" : ""}`;
    write(this.#hint, told);
    set(this.element, {
      class: `edge${node.locks ? " used" : ""}${chosen ? " chosen" : ""}`,
      "aria-level": levels(item),
      "aria-selected": chosen,
      "aria-label": told,
    });
  }
}

/** The mark for nodes that are left out, the children of one node. */
export class More {
  #name = svg("text", { class: "name" });
  #area = svg("rect", { class: "hit pill", rx: 4 });

  constructor(key) {
    this.element = svg("g", { class: "more", role: "treeitem", "data-key": key }, this.#area, this.#name);
  }

  draw(item) {
    put(this.#name, item.x + 8, middle(item) + 4, item.words);
    set(this.#area, { x: item.x, y: middle(item) - 13, width: item.length, height: 26 });
    set(this.element, { "aria-level": levels(item), "aria-expanded": false, "aria-label": `${item.words}: show some` });
  }
}

/** The sign for media: a mountain in a frame. */
const photo = (x, y) => `M${x} ${y}h12v9h-12zM${x} ${y + 8}l4 -4 3 3 2 -2 3 3`;

/** The sign for the disk: a cylinder. */
const disk = (x, y) => `M${x} ${y + 2}a5 2 0 0 1 10 0v6a5 2 0 0 1 -10 0zM${x} ${y + 2}a5 2 0 0 0 10 0`;

function put(text, x, y, words) {
  set(text, { x: x.toFixed(1), y: y.toFixed(1) });
  write(text, words);
}
