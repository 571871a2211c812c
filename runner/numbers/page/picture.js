// The picture of the trie. The arrow keys move between its items.

import { Edge, More, ROW, TOP, middle } from "./marks.js";
import { set, svg } from "./text.js";
import { layout, more, tree } from "./trie.js";

/** Draws into `box`. Calls `onChoose` with the chosen node (as `tree` returns it), or null if that no longer exists. */
export class Picture {
  #box;
  #none;
  #onChoose;
  #drawing = svg("svg", { role: "tree", "aria-label": "The branches of the prefix cache" });
  #turns = svg("g", { class: "turns" });
  #marks = new Map();
  #items = [];
  #tree = tree([]);
  #opened = new Map();
  #chosen = null;
  #current = null;

  constructor(box, none, onChoose) {
    this.#box = box;
    this.#none = none;
    this.#onChoose = onChoose;
    this.#drawing.append(this.#turns);
    this.#drawing.addEventListener("click", (event) => this.#clicked(event));
    this.#drawing.addEventListener("focusin", (event) => {
      this.#current = event.target.dataset.key;
      this.#rove();
    });
    this.#drawing.addEventListener("keydown", (event) => this.#pressed(event));
    box.append(this.#drawing);
    new ResizeObserver(() => this.#draw()).observe(box);
  }

  /** Draws a new state of the trie. */
  show(picture) {
    this.#tree = tree(picture.nodes);
    for (const id of this.#opened.keys()) if (id !== null && !this.#tree.byId.has(id)) this.#opened.delete(id);
    this.#draw();
    if (this.#chosen !== null) this.#onChoose(this.#tree.byId.get(this.#chosen) ?? null);
  }

  /** Forgets the user's choices. Call this for a new runner process, since its nodes may have the same ids. */
  forget() {
    this.#chosen = null;
    this.#opened.clear();
  }

  #draw() {
    const { items, width, rows } = layout(this.#tree, {
      width: this.#box.clientWidth, opened: this.#opened, chosen: this.#chosen,
    });
    this.#items = items;
    this.#none.hidden = items.length > 0;
    this.#drawing.style.display = items.length ? "" : "none";
    set(this.#drawing, { width: Math.floor(width), height: rows * ROW + 2 * TOP });
    const focused = this.#drawing.contains(document.activeElement) && document.activeElement;
    const gone = new Set(this.#marks.keys());
    let next = this.#turns.nextSibling;
    for (const item of items) {
      gone.delete(item.key);
      let mark = this.#marks.get(item.key);
      if (!mark) this.#marks.set(item.key, (mark = item.node ? new Edge(item.key) : new More(item.key)));
      mark.draw(item, item.node?.id === this.#chosen);
      if (mark.element === next) next = next.nextSibling;
      else this.#drawing.insertBefore(mark.element, next);
    }
    for (const key of gone) {
      this.#marks.get(key).element.remove();
      this.#marks.delete(key);
    }
    this.#turn();
    this.#rove();
    if (focused && document.activeElement !== focused) {
      this.#marks.get(this.#current)?.element.focus({ preventScroll: true }); // its element was moved or removed
    }
  }

  /** Draws the paths from nodes to their children. The paths to nodes without a parent begin at the left edge. */
  #turn() {
    const paths = this.#items.map((item) => {
      const x = item.x;
      const to = middle(item);
      const width = item.node ? Math.min(item.thickness, 10) : 1.5;
      const begin = item.from ? item.from.x + item.from.length : 6;
      const y = item.from ? middle(item.from) : middle(this.#items[0]);
      const bend = Math.min(x - begin, 20) || 1;
      const corner = begin + bend;
      const way = to === y
        ? `M${begin} ${y}H${x}`
        : `M${begin} ${y}C${begin + bend / 2} ${y} ${begin + bend / 2} ${y} ${begin + bend / 2} ${Math.min(y + 14, to)}` +
          `V${Math.max(to - 14, y)}Q${begin + bend / 2} ${to} ${corner} ${to}H${Math.max(x, corner)}`;
      return svg("path", { d: way, "stroke-width": width.toFixed(1), class: item.node ? "" : "few" });
    });
    this.#turns.replaceChildren(...paths);
  }

  /** Lets the Tab key reach exactly one item, the current one. */
  #rove() {
    if (!this.#marks.has(this.#current)) this.#current = this.#items[0]?.key ?? null;
    for (const [key, mark] of this.#marks) set(mark.element, { tabindex: key === this.#current ? 0 : -1 });
  }

  #clicked(event) {
    const key = event.target.closest("[data-key]")?.dataset.key;
    if (key) this.#choose(this.#items.find((item) => item.key === key));
  }

  #choose(item) {
    this.#current = item.key;
    if (item.node) {
      this.#chosen = item.node.id;
      this.#onChoose(item.node);
    } else {
      this.#opened = more(this.#opened, item.id);
    }
    this.#draw();
    if (item.node) return;
    const first = this.#items.find((each) => each.node && item.hidden.some((node) => node.id === each.node.id));
    if (first) this.#focus(first);
  }

  #pressed(event) {
    const at = this.#items.findIndex((item) => item.key === this.#current);
    const item = this.#items[at];
    if (!item || event.altKey || event.ctrlKey || event.metaKey) return;
    const next = {
      ArrowDown: () => this.#items[at + 1],
      ArrowUp: () => this.#items[at - 1],
      ArrowLeft: () => item.from,
      ArrowRight: () => this.#items.find((each) => each.from === item),
      Home: () => this.#items[0],
      End: () => this.#items.at(-1),
    }[event.key];
    if (next) {
      const to = next();
      if (to) this.#focus(to);
    } else if (event.key === "Enter" || event.key === " ") {
      this.#choose(item);
    } else {
      return;
    }
    event.preventDefault();
  }

  #focus(item) {
    this.#current = item.key;
    this.#rove();
    const element = this.#marks.get(item.key).element;
    element.focus({ preventScroll: true });
    element.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}
