/* Attention, which reads keys and values where a cache has them. */
#pragma once
#include "operation.h"

namespace {

/* The place of the oldest of these keys [..., keys, d]: behind those that were just written, which have taken the places of
 * older ones if a window rotates. 0 if the graph does not tell: then they are in the order of their tokens.
 *
 * Layers may share keys, whose graph is gone once the first of these layers is dispatched: what it told is remembered. */
int oldest_of(const array &k) {
  static thread_local std::array<std::pair<std::uintptr_t, int>, 128> told{}; /* of the last keys by their ids */
  static thread_local size_t next;
  const auto same = std::find_if(told.begin(), told.end(), [&](const auto &each) { return each.first == k.id(); });
  if (!k.has_primitive()) return same == told.end() ? 0 : same->second % k.shape(2);
  const bool written = !strcmp(k.primitive().name(), "SliceUpdate"); /* its type is not exported */
  const int oldest = written ? std::get<2>(static_cast<const mx::SliceUpdate &>(k.primitive()).state())[2] % k.shape(2) : 0;
  (same == told.end() ? told[next++ % told.size()] : *same) = {k.id(), oldest}; /* ids are used again: so all are noted */
  return oldest;
}

/* The column of the newest of these keys, if a compiled step has written it: an array, since its number is known only when
 * the step runs. The next column has the oldest key. */
Maybe newest_of(const array &k) {
  const bool written = k.has_primitive() && k.shape(0) == 1 && !strcmp(k.primitive().name(), "ScatterAxis");
  return written && k.inputs()[1].dtype() == mx::int32 ? Maybe(k.inputs()[1]) : std::nullopt;
}

/* Heads that a thread computes together if all have the same keys. Fewer of them give work to more threads; more of them
 * read the keys less often. */
const int MOST_TOGETHER = 8, LEAST_TOGETHER = 3;

struct FusedAttention {
  static constexpr const char *name = "FastAttention";
  float scale;
  bool causal, mask, sinks, newest;
  int oldest;
  MaybeAsked asked;
  bool operator==(const FusedAttention &) const = default;

  array original(const Arrays &in, mx::StreamOrDevice s) const {
    return own_attention(in[0], in[1], in[2], scale, causal ? "causal" : "", maybe(in, 3, mask), maybe(in, 3 + mask, sinks), false, s);
  }
  mx::Shape shape(const Arrays &in) const {
    auto shape = in[0].shape();
    shape.back() = in[2].shape(-1);
    return shape;
  }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array q = with_rows(in[0], encoder), k = with_rows(in[1], encoder), v = with_rows(in[2], encoder);
    Attention a{};
    a.q = q.data<void>(), a.k = k.data<void>(), a.v = v.data<void>(), a.out = out.data<void>();
    a.kv_heads = k.shape(1), a.heads = q.shape(1) / k.shape(1), a.queries = q.shape(2), a.keys = k.shape(2);
    a.d = q.shape(3), a.dv = v.shape(3), a.type = type_of(q.dtype()), a.causal = causal, a.oldest = oldest, a.scale = scale;
    for (int i = 0; i < 3; i++) a.qs[i] = q.strides()[i], a.ks[i] = k.strides()[i], a.vs[i] = v.strides()[i];
    if (mask) {
      a.mask = in[3].data<void>(), a.mask_type = type_of(in[3].dtype());
      for (int i = 0; i < 4; i++) a.ms[i] = in[3].strides()[i];
    }
    if (sinks) a.sinks = whole(in[3 + mask], encoder).data<void>();
    if (a.kv_heads == 1) { /* parts for threads: groups of heads which read the same keys */
      int together = std::min(MOST_TOGETHER, a.heads);
      while (a.heads % together) together--;
      if (together >= LEAST_TOGETHER) a.kv_heads = a.heads / together, a.heads = together, a.ks[1] = a.vs[1] = 0;
    }
    const int32_t *column = newest ? in.back().data<int32_t>() : nullptr;
    encoder.dispatch([a, column, batch = q.shape(0), width = (size_t)kernels->width, asked = asked, row_bytes = out.itemsize() * a.dv]() mutable {
      if (column) a.oldest = (*column + 1) % a.keys;
      const int queries = std::max(8, QUERIES / a.heads), parts = (a.queries + queries - 1) / queries;
      const size_t rows = a.heads * std::min(queries, a.queries), d = (a.d + width - 1) / width * width, dv = (a.dv + width - 1) / width * width;
      const size_t room = rows * (d + dv + TILE + 3) + TILE * (d + dv), work = (size_t)batch * a.kv_heads * a.heads * a.queries * a.keys * (a.d + a.dv);
      each(batch * a.kv_heads * parts, shares(a.queries, work), [&](int i) {
        const int part = parts - 1 - i % parts, row = i / parts / a.kv_heads, kv_head = i / parts % a.kv_heads; /* the longest first */
        const int from = part * queries, to = std::min(from + queries, a.queries), end = asked ? std::clamp(asked->counts[row], from, to) : to;
        if (end > from) kernels->attend(a, row, kv_head, from, end, scratch(room));
        for (int head = 0; end < to && head < a.heads; head++)
          memset((char *)a.out + row_bytes * (((size_t)(row * a.kv_heads + kv_head) * a.heads + head) * a.queries + end), 0, row_bytes * (to - end));
      });
    });
  }
};

}  // namespace
