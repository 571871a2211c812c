// Computes the positions of nodes in the picture of the trie, without side effects.
//
// Every visible branch has a row. A node is in the row of its first child, so the oldest path is a straight line, and
// other paths branch off below it. An edge's length grows with the square root of its number of tokens, so that short
// edges stay visible beside long ones. An edge's thickness grows with the square root of the bytes of its subtree.

import { room } from "./label.js";
import { bytes, count } from "./text.js";

export const ROWS = 40;
const MOST_NODES = 600;
const MORE_AT_ONCE = 20;
const GAP = 20;
const LEFT = 18;
const RIGHT = 10;
const SHORTEST = 12;
const NARROW = 500;
const SHORTEST_NARROW = 36;
const THINNEST = 3;
const THICKEST = 18;

/** Links nodes to parents (`above`) and children, and sums bytes and counts over each subtree. */
export function tree(nodes) {
  const all = nodes.map((node) => ({
    ...node, children: [], weight: node.bytes, count: 1, first: node.id, above: null, latest: node.idle_uses,
  }));
  const byId = new Map(all.map((node) => [node.id, node]));
  const roots = [];
  for (const node of all) {
    node.above = byId.get(node.parent) ?? null;
    (node.above?.children ?? roots).push(node);
  }
  for (const node of all.toReversed()) {
    const above = node.above;
    if (!above) continue;
    above.weight += node.weight;
    above.count += node.count;
    above.first = Math.min(above.first, node.first);
    above.latest = Math.min(above.latest, node.latest);
  }
  return { all, byId, roots };
}

/**
 * Returns the items to draw and the size of the picture: { items, width in pixels, number of rows }.
 *
 * An item has `key`, `row`, `x`, `length` and `from` (the parent's item, or null). An item for a node has `node` and
 * `thickness`. An item for nodes that are left out has these nodes (`hidden`) and a text about them (`words`). `opened`
 * maps a node's id (null: the root) to the number of hidden children to show, too. The node `chosen` is always shown.
 */
export function layout({ all, byId, roots }, { width, opened, chosen }) {
  const shown = choose(all, byId, opened, chosen, roots);
  const heaviest = Math.max(1, ...roots.map((node) => node.weight));
  const items = [];
  let rows = 0;

  function place(children, from, id) {
    const visible = children.filter((node) => shown.has(node)).sort((a, b) => a.first - b.first);
    const hidden = children.filter((node) => !shown.has(node));
    visible.forEach((node, index) => {
      if (index || !from) rows += items.length ? 1 : 0;
      const thickness = THINNEST + (THICKEST - THINNEST) * Math.sqrt(node.weight / heaviest);
      const item = { key: `n${node.id}`, node, row: rows, from, thickness, length: 0, x: 0 };
      items.push(item);
      place(node.children, item, node.id);
    });
    if (!hidden.length) return;
    if (visible.length || !from) rows += items.length ? 1 : 0;
    const weight = hidden.reduce((sum, node) => sum + node.weight, 0);
    const words = `${count(hidden.length)} more, ${bytes(weight)}`;
    items.push({ key: `m${id}`, id, hidden, words, row: rows, from, length: room(words), x: 0 });
  }

  place(roots, null, null);
  const wide = stretch(items, width);
  return { items, width: wide, rows: items.length ? rows + 1 : 0 };
}

/** Returns `opened` after a click on the mark for the hidden children of a node: some more of them are shown. */
export const more = (opened, id) => new Map(opened).set(id, (opened.get(id) ?? 0) + MORE_AT_ONCE);

/** Returns the nodes to draw: as many as fit (used nodes first, then large nodes), and nodes that a click asked for. */
function choose(all, byId, opened, chosen, roots) {
  const order = [...all].sort((a, b) => (b.locks > 0) - (a.locks > 0) || b.weight - a.weight);
  const shown = new Set();
  const begun = new Set();
  let rows = 0;
  for (const node of order) {
    if (rows >= ROWS || shown.size >= MOST_NODES) break;
    if (node.above && !shown.has(node.above)) continue;
    if (!node.above || begun.has(node.above)) rows += 1;
    begun.add(node.above);
    shown.add(node);
  }
  for (const [id, number] of opened) {
    const children = id === null ? roots : byId.get(id)?.children ?? [];
    const hidden = children.filter((node) => !shown.has(node)).sort((a, b) => b.weight - a.weight);
    for (let node of hidden.slice(0, number)) {
      for (; node; node = heaviest(node.children)) shown.add(node);
    }
  }
  for (let node = byId.get(chosen); node; node = node.above) shown.add(node);
  for (const node of shown) { // the mark for a single hidden node needs as much room as the node
    const hidden = node.children.filter((child) => !shown.has(child));
    if (hidden.length === 1 && shown.size < MOST_NODES) shown.add(hidden[0]);
  }
  for (const node of [...shown]) for (let above = node.above; above; above = above.above) shown.add(above);
  return shown;
}

const heaviest = (nodes) => nodes.reduce((most, node) => (most && most.weight >= node.weight ? most : node), null);

/** Sets `x` and `length` of every item, to fit into `width` if possible. Returns the width of the picture. */
function stretch(items, width) {
  const shortest = width < NARROW ? SHORTEST_NARROW : SHORTEST; // long enough for words: a narrow picture scrolls
  const span = (item, scale) =>
    item.node ? Math.max(shortest, scale * Math.sqrt(item.node.end - item.node.start)) : item.length;

  function spread(scale) {
    let right = 0;
    for (const item of items) {
      item.x = item.from ? item.from.x + item.from.length + GAP : LEFT;
      item.length = span(item, scale);
      right = Math.max(right, item.x + item.length);
    }
    return right;
  }

  const most = width - RIGHT;
  let low = 0;
  let high = most;
  for (let step = 0; step < 24; step++) {
    const middle = (low + high) / 2;
    if (spread(middle) <= most) low = middle;
    else high = middle;
  }
  return Math.max(spread(low), most) + RIGHT;
}
