// Texts about the runner's counters: the rows of a table, and one-line summaries.

import { oneLine } from "./label.js";
import { bytes, count, counted, duration, percent, rate } from "./text.js";

const MISSES = {
  off: "the cache is off",
  empty: "the cache was empty",
  salt: "cached under another salt",
  no_common_prefix: "nothing in common",
  lost: "cached state was lost",
  non_trimmable_divergence: "a layer cannot be rewound",
  window_passed: "outside a sliding window",
};

/** Returns `mlx-runner 0.1.0 · LlamaForCausalLM · CPU · context of 4,096 tokens · cache trie`, and the model's path. */
export const about = (stats) =>
  [`mlx-runner ${stats.version}`, stats.architecture, stats.device.toUpperCase(), `context of ${count(stats.context_length)} tokens`, `cache ${stats.cache_kind}`, oneLine(stats.path)]
    .filter(Boolean)
    .join(" · ");

export const requestsNote = ({ parallel, requests: { running, queued } }) =>
  `${count(running)} of ${count(parallel)} running, ${count(queued)} waiting`;

/** Returns the number of drafts from known text, given the number for each source. */
const fromText = ({ path = 0, own = 0, earlier = 0 }) => path + own + earlier;

const right = (accepted, drafted, state) =>
  `${count(accepted)} of ${count(drafted)} tokens right${state === "on" ? "" : `, ${state} now`}`;

/** Returns rows about drafts: from known text, from a draft model, and first tokens known without a forward. */
const drafts = ({ drafted, accepted, state, model }) => [
  ...(fromText(drafted) ? [["Drafts", right(fromText(accepted), fromText(drafted), state)]] : []),
  ...(model ? [["Draft model", right(accepted.model ?? 0, drafted.model ?? 0, model.state)]] : []),
  ...(accepted.known ? [["Known first tokens", `${count(accepted.known)}`]] : []),
];

/** Returns [name, value] rows about the ranks, the processes that compute the model together. None for one process. */
const ranks = ({ members, backend, latency_us, gbit_s }) => members.length === 0 ? [] : [
  ["Ranks", `${members.length} by ${backend}, ${count(latency_us)} µs, ${gbit_s.toFixed(1)} Gbit/s`],
  ...members.map(({ rank, memory_bytes }) => [`Memory of rank ${rank}`, bytes(memory_bytes)]),
];

/** Returns a row with the mean speed, or no row if no time was spent. */
const speed = (name, tokens, seconds) => seconds ? [[name, `${rate(tokens / seconds)} tokens/s`]] : [];

/** Returns [name, value] rows about everything since the runner's start. */
export function totals(stats) {
  const { requests, tokens, slices, cache } = stats;
  const others = [["Ended at their limit", requests.length], ["Cancelled", requests.cancelled], ["Failed", requests.failed], ["Refused", requests.refused]];
  return [
    ["Answered", count(requests.done + requests.length)],
    ...others.filter(([, number]) => number).map(([name, number]) => [name, count(number)]),
    ["Prompts", `${count(tokens.prompt)} tokens`],
    ["From the cache", `${count(tokens.cached)} tokens`],
    ["Computed", `${count(tokens.recomputed)} tokens`],
    ...speed("Prompt speed", slices.prefill_tokens, slices.prefill_s),
    ["Generated", `${count(tokens.generated)} tokens`],
    ...speed("Answer speed", tokens.generated, slices.decode_s),
    ...(tokens.forced ? [["Forced by a grammar", `${count(tokens.forced)} tokens (${percent(tokens.forced / Math.max(1, tokens.generated))})`]] : []),
    ...(stats.scores.rows ? [["Scores", `${counted(stats.scores.rows, "row")} of ${count(stats.scores.tokens)} tokens, ${count(stats.scores.cached)} cached`]] : []),
    ...(stats.embeddings.texts ? [["Embeddings", `${counted(stats.embeddings.texts, "text")} of ${count(stats.embeddings.tokens)} tokens in ${counted(stats.embeddings.forwards, "forward")}`]] : []),
    ...drafts(stats.drafts),
    ...(stats.media.encoded ? [["Media", `${count(stats.media.encoded)} of ${count(stats.media.soft_tokens)} tokens, ${duration(stats.media.encode_s)}`]] : []),
    ...(stats.disk.state === "none" ? [] : [
      ["On disk", `${bytes(stats.disk.held_bytes)} of ${bytes(stats.disk.budget_bytes)}${stats.disk.state === "on" ? "" : `, ${stats.disk.state}`}`],
      ["From disk", `${count(stats.disk.restored_tokens)} tokens, ${counted(stats.disk.restores, "request")}`],
    ]),
    ...ranks(stats.ranks),
    ["Cache, live", `${bytes(cache.live_bytes)}, ${bytes(cache.running_bytes)} running`],
    ["Cache, paged out", `${bytes(cache.paged_bytes)}, ${bytes(cache.checkpoint_bytes)} checkpoints`],
    ...(cache.restored_bytes ? [["Restored", bytes(cache.restored_bytes)]] : []),
    ...(cache.evictions ? [["Evicted", `${bytes(cache.evicted_bytes)}, ${counted(cache.evictions, "node")}`]] : []),
    ["Weights", bytes(stats.memory.weights_bytes)],
    ["MLX's reserve", bytes(stats.memory.reusable_bytes)],
    ...Object.entries(cache.misses).map(([reason, number]) => [`Miss: ${MISSES[reason] ?? reason.replaceAll("_", " ")}`, count(number)]),
  ];
}
