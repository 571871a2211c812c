// The numbers of the last ten minutes. Only the page keeps them, as long as it is open.

export const SPAN_S = 600;
export const STEP_S = 2;
const HIT_WINDOW_S = 60;
const SPEED_WINDOW_S = 4;

/** Samples of the counters. A sample holds until the next one, since the runner sends only changes. */
export class History {
  #samples = [];
  #ended = null;

  /** Adds a sample. `at` is the present second on the page's clock. */
  add(at, stats) {
    const last = this.#samples.at(-1);
    // A new runner process counts from zero.
    const fresh = !last || this.#ended !== null || stats.uptime_s < last.uptime_s;
    const since = fresh ? at : last.since;
    this.#samples.push({
      at,
      since,
      from: fresh && last ? this.#ended ?? at : null,
      uptime_s: stats.uptime_s,
      prompt: stats.tokens.prompt,
      cached: stats.tokens.cached,
      generated: stats.tokens.generated,
      used: stats.memory.used_bytes,
    });
    this.#ended = null;
    // One sample from before the span is kept, since it holds at the beginning of the span.
    const oldest = at - SPAN_S - HIT_WINDOW_S;
    while (this.#samples.length > 1 && this.#samples[1].at < oldest) this.#samples.shift();
  }

  /** Records that nothing is known from the moment `at` until the next sample. */
  end(at) {
    if (this.#samples.length) this.#ended ??= at;
  }

  /** Returns the last moment about which something is known. */
  until(now) {
    return this.#ended ?? now;
  }

  /**
   * Returns a value for every STEP_S of the span, and one for now. A value is null if it is unknown. `kind` is `hits`,
   * `memory` or `speed`. Two calls within a step differ only in the last value.
   */
  series(kind, now) {
    const steps = SPAN_S / STEP_S;
    const last = (Math.ceil(this.until(now) / STEP_S) - 1) * STEP_S;
    const values = [];
    for (let step = steps - 1; step >= 0; step--) {
      const at = last - step * STEP_S;
      const sample = this.#at(at);
      values.push(sample ? this.#kinds[kind](sample, at) : null);
    }
    const newest = this.#at(this.until(now));
    values.push(newest ? this.#kinds[kind](newest, this.until(now)) : null);
    return values;
  }

  #kinds = {
    memory: (sample) => sample.used,
    hits: (sample, at) => this.#hits(sample, at),
    speed: (sample, at) => this.#speed(sample, at),
  };

  /** Returns the share of the last minute's prompt tokens that came from the cache. */
  #hits(sample, at) {
    const first = this.#at(Math.max(at - HIT_WINDOW_S, sample.since));
    const prompt = sample.prompt - first.prompt;
    return prompt > 0 ? (sample.cached - first.cached) / prompt : null;
  }

  /** Returns the speed of all answers together, in tokens a second. */
  #speed(sample, at) {
    const from = Math.max(at - SPEED_WINDOW_S, sample.since);
    const first = this.#at(from);
    return at - from >= 1 ? (sample.generated - first.generated) / (at - from) : 0;
  }

  /** Returns the sample that holds at a moment: null before the first sample, and while no runner answered. */
  #at(at) {
    let low = 0;
    let high = this.#samples.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.#samples[middle].at <= at) low = middle + 1;
      else high = middle;
    }
    const next = this.#samples[low];
    if (low === 0 || (next && next.from !== null && at >= next.from)) return null;
    return this.#samples[low - 1];
  }
}
