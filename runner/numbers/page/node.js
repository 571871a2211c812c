// The details of one node of the trie.

import { oneLine } from "./label.js";
import { bytes, count, counted, rows, write } from "./text.js";

/** Fills the elements with the details of a node. `node` is null if the chosen node no longer exists. */
export function describe({ name, text, list }, node) {
  if (!node) {
    write(name, "The node no longer exists");
    write(text, "It was evicted, or merged with another node.");
    rows(list, []);
    return;
  }
  const tokens = node.end - node.start;
  write(name, `${counted(tokens, "token")}, ${bytes(node.bytes)}`);
  write(text, node.text === null || node.text === undefined
    ? "Its text is hidden: start the runner with --inspect-text to show it."
    : `“${oneLine(node.text)}”`);
  const layers = (number, size) => (number ? `${count(number)} of ${count(node.layers)}${size}` : "none");
  rows(list, [
    ["Position", `${count(node.start)} to ${count(node.end)}`],
    ["Live layers", layers(node.live_layers, `, ${bytes(node.live_bytes)}`)],
    ["Paged layers", layers(node.paged_layers, `, ${bytes(node.paged_bytes)}`)],
    ["Missing layers", layers(node.missing_layers, "")],
    ["Last use", node.idle_uses ? `${counted(node.idle_uses, "use")} ago` : "most recent"],
    ["In use by", node.locks ? counted(node.locks, "request") : "no request"],
    ...(node.media ? [["Media", count(node.media)]] : []),
    ...(node.stored || node.restored ? [["On disk", `${node.stored === tokens ? "all" : `${count(node.stored)} of ${count(tokens)}`} tokens${node.restored ? ", brought from there" : ""}`]] : []),
    ["Checkpoint", node.restore_point ? "yes" : "no"],
    ["Branches", node.children.length ? counted(node.children.length, "branch", "branches") : "none"],
    ["With all below", node.count > 1 ? `${counted(node.count, "node")}, ${bytes(node.weight)}` : "only itself"],
  ]);
}
