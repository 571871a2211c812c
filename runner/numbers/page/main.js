// Receives the runner's events and draws them.

import { Chart, rounded } from "./chart.js";
import { follow } from "./events.js";
import { History } from "./history.js";
import { describe } from "./node.js";
import { Picture } from "./picture.js";
import { Requests } from "./requests.js";
import { oneLine } from "./label.js";
import { bytes, counted, duration, percent, rate, rows, write } from "./text.js";
import { about, requestsNote, totals } from "./totals.js";

const find = (id) => document.getElementById(id);
const clock = () => performance.now() / 1000;

const history = new History();
const charts = {
  hits: new Chart(find("hits"), "Hit rate", percent),
  memory: new Chart(find("memory"), "Memory", bytes),
  speed: new Chart(find("speed"), "Speed", (number) => `${rate(number)} tokens/s`),
};
const requests = new Requests(find("requests"), find("requests-none"));
const details = { name: find("node-name"), text: find("node-text"), list: find("node") };
const picture = new Picture(find("picture"), find("picture-none"), (node) => describe(details, node));

let stats = null;
let received = 0;
let cache = null;
let drawn = false;

follow("/v1/events", { stats: tell, cache: showCache }, { back, lost });
setInterval(() => {
  if (stats && live()) drawTime();
}, 1000);
document.addEventListener("visibilitychange", drawAll);

const live = () => document.body.dataset.state === "live";

function tell(told) {
  // A new runner process may use the same ids for other nodes.
  if (stats && told.uptime_s < stats.uptime_s) picture.forget();
  stats = told;
  received = clock();
  history.add(received, stats);
  drawStats();
}

function showCache(told) {
  cache = told;
  drawn = false;
  drawCache();
}

function back() {
  document.body.dataset.state = "live";
  write(find("state-word"), "live");
  write(find("ended"), "");
}

function lost() {
  if (!live()) {
    if (stats === null) write(find("ended"), "No runner answers here. The page continues as soon as one does.");
    return;
  }
  history.end(clock());
  const time = new Date().toLocaleTimeString("en-GB");
  document.body.dataset.state = "ended";
  write(find("state-word"), "ended");
  write(find("ended"), `The runner ended at ${time}: these are its last figures. The page continues when a runner is back on this port.`);
  drawAll();
}

function drawAll() {
  if (stats) drawStats();
  if (cache && !drawn) drawCache();
}

/** Draws all but the cache. A hidden page is not drawn until it is visible again. */
function drawStats() {
  if (document.hidden) return;
  const model = oneLine(stats.model);
  document.title = `${model} · mlx-runner`;
  write(find("model"), model);
  write(find("about"), about(stats));
  write(find("requests-note"), requestsNote(stats));
  requests.draw(stats.running);
  rows(find("totals"), totals(stats));
  const { held_bytes: held, budget_bytes: budget, nodes } = stats.cache;
  write(find("cache-note"), `${counted(nodes, "node")}, ${bytes(held)}${budget === null ? "" : ` of ${bytes(budget)}`}`);
  show(".of-disk", stats.disk.state !== "none");
  drawTime();
}

/** Shows or hides those lines of the picture's legend that a selector matches. */
function show(keys, needed) {
  for (const key of document.querySelectorAll(keys)) key.hidden = !needed;
}

function drawTime() {
  if (document.hidden) return;
  const now = history.until(clock());
  write(find("uptime"), duration(stats.uptime_s + Math.max(0, now - received)));
  const { tokens, memory } = stats;

  const all = tokens.prompt ? percent(tokens.cached / tokens.prompt) : "–";
  const hits = history.series("hits", now);
  const minute = hits.at(-1);
  charts.hits.draw(hits, {
    value: all,
    note: minute === null ? "no prompt in the last minute" : `${percent(minute)} in the last minute`,
    most: 1,
    label: `Hit rate: ${all} of all prompt tokens came from the cache`,
  });

  const used = history.series("memory", now);
  const budget = memory.budget_bytes;
  const highest = Math.max(...used, 1);
  const most = budget !== null && budget < 3 * highest ? Math.max(budget, highest) : rounded(highest * 1.05);
  charts.memory.draw(used, {
    value: bytes(memory.used_bytes),
    note: `${budget === null ? "" : `of ${bytes(budget)}; `}peak ${bytes(memory.peak_bytes)}`,
    most,
    bound: budget,
    label: `Memory: ${bytes(memory.used_bytes)} used, at most ${bytes(memory.peak_bytes)} so far`,
  });

  const speeds = history.series("speed", now);
  const speed = `${rate(live() ? speeds.at(-1) : 0)} tokens/s`;
  charts.speed.draw(speeds, {
    value: speed,
    note: stats.ttft_s === null ? "nothing written yet" : `last answer began after ${duration(stats.ttft_s)}`,
    most: rounded(Math.max(...speeds, 10)),
    label: `Speed of all answers together: ${speed}`,
  });
}

function drawCache() {
  if (document.hidden) return;
  drawn = true;
  const empty = "The cache is empty: the next prompt makes the first branch.";
  write(find("picture-none"), cache.kind === "none" ? "Nothing is kept: the runner was started with --cache none." : empty);
  show(".of-media", cache.nodes.some((node) => node.media));
  picture.show(cache);
}
