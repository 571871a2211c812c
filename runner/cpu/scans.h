/* Scans of recurrences, as `simd.h` includes them: vectors lie along the columns of a state, of which four rows are taken
 * at a time.
 *
 * One pass over a row does all that a token needs: the update, the sum for the output, and the sum with the next token's
 * vector, from which the next update is made. The first token's is summed before, in the same order. So the bits are the
 * same wherever tokens are cut. */

namespace {

/* Up to four numbers; the others are 0. */
INLINE Quarter four(const float *p, int count) {
  if (count == 4) return *(const LooseQuarter *)p;
  Quarter v = {};
  memcpy(&v, p, 4 * count);
  return v;
}

/* Updates `rows` rows of a state from `first` on, of which each has room for whole vectors, and writes their outputs. The
 * state before the first token is in `from`. A token's sums of some rows are added up while the next rows are updated. */
template <int RULE, bool CHANNELS>
INLINE void scan_rows(const Scan &a, const float *const *base, const int *tokens, int length, const float *from, float *states, int first, int rows, char *y) {
  enum { Q = RULE == SELECTIVE ? 4 : 0, G = RULE == WKV ? 1 : 3, K = RULE == WKV ? 2 : RULE == SELECTIVE ? 3 : 1, VALUES = RULE == WKV ? 3 : RULE == SELECTIVE ? 0 : 2, BETA = RULE == SELECTIVE ? 1 : 4 };
  constexpr bool ASKS = RULE == DELTA || RULE == WKV;
  const size_t n = up(a.columns, WIDTH);
  const auto at = [&](int i, int token) { return base[i] + token * a.in[i].token; };
  const auto asked = [&](int token, size_t j) { /* of the state before the token */
    if constexpr (RULE == WKV) return load(at(4, token) + j);
    else return CHANNELS ? load(at(G, token) + j) * load(at(K, token) + j) : load(at(K, token) + j);
  };
  const auto fetch = [&](int row) { /* four more rows of the state, which a decode step finds in main memory */
    for (size_t j = 0; j < 4 * n; j += 16) __builtin_prefetch(from + (row + 4) * n + j);
  };
  Quarter answers[SCANNED / 4] = {};
  for (int row = 0; ASKS && row < rows; row += 4) {
    V sums[4] = {};
    fetch(row);
    for (size_t j = 0; j < n; j += WIDTH) {
      const V probe = asked(tokens[0], j);
      UNROLLED for (int r = 0; r < 4; r++) sums[r] += load(from + (row + r) * n + j) * probe;
    }
    answers[row / 4] = totals(sums[0], sums[1], sums[2], sums[3]);
  }
  for (int i = 0; i < length; i++) {
    const int token = tokens[i], next = tokens[i + 1 < length ? i + 1 : i];
    const float *q = at(Q, token), *k = at(K, token), *g = RULE == SELECTIVE ? NULL : at(G, token);
    char *place = y + (size_t)token * a.token_bytes;
    for (int row = 0; row < rows; row += 4) {
      const int place_of = first + row, count = (int)least(rows - row, 4);
      const Quarter values = four(at(VALUES, token) + place_of, count), answer = answers[row / 4];
      const float *decays[4];
      Quarter times = values, steps = {};
      if constexpr (RULE == DECAY) times = *at(BETA, token) * values;
      if constexpr (RULE == DELTA) times = *at(BETA, token) * (values - (CHANNELS ? answer : answer * *g));
      if constexpr (RULE == SELECTIVE) {
        steps = four(at(BETA, token) + place_of, count);
        times = steps * values;
        UNROLLED for (int r = 0; r < 4; r++) decays[r] = at(2, place_of + (r < count ? r : 0));
      }
      const float *old = (i ? states : from) + row * n;
      float *state = states + row * n;
      V sums[4] = {}, following[4] = {};
      if (!ASKS && !i) fetch(row);
      for (size_t j = 0; j < n; j += WIDTH) {
        const V key = load(k + j), query = load(q + j), probe = ASKS ? asked(next, j) : V{};
        V decay = RULE == SELECTIVE ? V{} : CHANNELS ? load(g + j) : all(*g);
        UNROLLED for (int r = 0; r < 4; r++) {
          if constexpr (RULE == SELECTIVE) decay = exponential(steps[r] * load(decays[r] + j));
          V now = load(old + r * n + j) * decay;
          now += times[r] * key;
          if constexpr (RULE == WKV) now += answer[r] * load(at(5, token) + j);
          store(state + r * n + j, now);
          sums[r] += now * query;
          if constexpr (ASKS) following[r] += now * probe;
        }
      }
      Quarter out = totals(sums[0], sums[1], sums[2], sums[3]);
      if constexpr (RULE == DECAY) out += *at(5, token) * values;
      if constexpr (RULE == SELECTIVE) out += four(base[5] + place_of, count) * values;
      if constexpr (ASKS) answers[row / 4] = totals(following[0], following[1], following[2], following[3]);
      if (a.type == F32 && count == 4) *(LooseQuarter *)((float *)place + place_of) = out;
      else for (int r = 0; r < count; r++) put(place, a.type, place_of + r, out[r]);
    }
  }
}

/* h = a h + x, for columns `from` to `to`. */
void scan_unit(const Scan &a, const float *const *base, const int *tokens, int length, float *after, int from, int to, char *y) {
  for (int i = 0; i < length; i++) {
    const float *x = base[0] + tokens[i] * a.in[0].token, *factor = base[1] + tokens[i] * a.in[1].token;
    int j = from;
    for (; j + WIDTH <= to; j += WIDTH) store(after + j, load(after + j) * load(factor + j) + load(x + j));
    for (; j < to; j++) after[j] = after[j] * factor[j] + x[j];
    char *place = y + (size_t)tokens[i] * a.token_bytes;
    from_float(after + from, (size_t)(to - from), place + size_of(a.type) * from, a.type);
  }
}

/* Rows `from` to `to`, at most SCANNED, of the state of one head of one text. `scratch` holds SCANNED rows. */
void scan(const Scan &a, int batch, int head, int from, int to, float *scratch) {
  const float *base[6];
  for (int i = 0; i < 6; i++) base[i] = a.in[i].p + batch * a.in[i].batch + head / a.in[i].heads_each * a.in[i].head;
  const size_t columns = a.columns, n = up(columns, WIDTH), state = ((size_t)batch * a.heads + head) * a.rows * columns;
  const float *before = a.before + state;
  float *after = a.after + state;
  char *y = a.y + batch * a.batch_bytes + head * size_of(a.type) * a.rows;
  const int *tokens = a.tokens + batch * (size_t)a.length, count = a.counts[batch], rows = to - from;
  for (int i = 0, t = 0; i < a.length; i++) {
    if (t < count && tokens[t] == i) t++;
    else memset(y + i * a.token_bytes + size_of(a.type) * from, 0, size_of(a.type) * rows);
  }
  const bool padded = rows % 4 || columns < n;
  if (before != after && (padded || !count)) memcpy(after + from * columns, before + from * columns, 4 * rows * columns);
  if (!count) return;
  if (a.rule == LINEAR) return scan_unit(a, base, tokens, count, after, from, to, y);
  const float *source = padded ? scratch : before + from * columns;
  float *states = padded ? scratch : after + from * columns;
  if (padded) memset(scratch, 0, 4 * n * up(rows, 4));
  for (int r = 0; padded && r < rows; r++) memcpy(scratch + r * n, after + (from + r) * columns, 4 * columns);
  switch (a.rule * 2 + a.channels) {
    case DECAY * 2: scan_rows<DECAY, false>(a, base, tokens, count, source, states, from, rows, y); break;
    case DELTA * 2: scan_rows<DELTA, false>(a, base, tokens, count, source, states, from, rows, y); break;
    case DELTA * 2 + 1: scan_rows<DELTA, true>(a, base, tokens, count, source, states, from, rows, y); break;
    case WKV * 2 + 1: scan_rows<WKV, true>(a, base, tokens, count, source, states, from, rows, y); break;
    case SELECTIVE * 2 + 1: scan_rows<SELECTIVE, true>(a, base, tokens, count, source, states, from, rows, y); break;
  }
  for (int r = 0; padded && r < rows; r++) memcpy(after + (from + r) * columns, scratch + r * n, 4 * columns);
}

/* One row of n numbers. `steps` may be NULL. */
void gates(const Gates &a, const float *x, float *decays, float *steps) {
  for (size_t i = 0; i < a.n; i += WIDTH) {
    const size_t count = least(a.n - i, WIDTH);
    float rest[3][WIDTH] = {};
    if (count < WIDTH) memcpy(rest[0], x + i, 4 * count);
    const V given = load(count < WIDTH ? rest[0] : x + i) + load(a.bias + i), rate = load(a.rates + i);
    float *decay = count < WIDTH ? rest[1] : decays + i, *step = count < WIDTH || !steps ? rest[2] : steps + i;
    if (a.bound != 0) {
      store(decay, exponential(a.bound * sigmoid(rate * given)));
    } else {
      const V soft = softplus(given), within = soft < a.least ? all(a.least) : soft > a.most ? all(a.most) : soft;
      store(decay, exponential(-(rate * within)));
      store(step, within);
    }
    if (count == WIDTH) continue;
    memcpy(decays + i, decay, 4 * count);
    if (steps) memcpy(steps + i, step, 4 * count);
  }
}

}  // namespace
