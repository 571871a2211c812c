/* Scans of recurrences: the kernel that `runner/model/scans/kernel.py` asks for by the name of its rule. */
#pragma once
#include "operation.h"

namespace {

enum { FLOATS_AT_ONCE = 4096 }; /* of a state: with the vectors of a token, they fit into a first-level cache */

struct Recurrence {
  static constexpr const char *name = "FastScan";
  int rule;
  bool masked;
  mx::Dtype type;
  const Kernels *table; /* asked for once: MLX's own cannot take their place later */
  bool operator==(const Recurrence &) const = default;

  const array &values(const Arrays &in) const { return in[rule == WKV ? 3 : rule == SELECTIVE || rule == LINEAR ? 0 : 2]; }
  bool by_heads() const { return rule != SELECTIVE && rule != LINEAR; }
  size_t inputs() const { return rule == DECAY || rule == WKV || rule == SELECTIVE ? 6 : rule == DELTA ? 5 : 2; }
  const array &state(const Arrays &in) const { return in[inputs()]; }
  std::vector<mx::Shape> shapes(const Arrays &in) const { return {values(in).shape(), state(in).shape()}; }
  std::vector<mx::Dtype> types() const { return {type, mx::float32}; }

  /* Says what is wrong with the inputs: by axis, their sizes are those of the state. */
  void check(const Arrays &in) const {
    static constexpr const char *last_axes[] = {"ccrhhh", "ccrhh", "cccrcc", "rrcccr", "rr"}; /* rows, columns or heads of the state */
    const int axes = by_heads() ? 4 : rule == LINEAR ? 2 : 3;
    bool fits = in.size() == inputs() + 1 + masked && state(in).dtype() == mx::float32 && state(in).ndim() == (size_t)axes && values(in).size() > 0;
    const mx::Shape tokens = fits ? mx::Shape{values(in).shape(0), values(in).shape(1)} : mx::Shape{}, of = fits ? state(in).shape() : mx::Shape{};
    fits = fits && of[0] == tokens[0];
    for (size_t i = 0; fits && i < inputs(); i++) {
      const mx::Shape &shape = in[i].shape();
      const char last = rule == DELTA && i == 3 && shape.size() == 4 ? 'c' : last_axes[rule][i];
      fits = is_float(in[i]) && shape.size() >= 1 && shape.back() == (last == 'r' ? of[rule == LINEAR ? 1 : axes - 2] : last == 'c' ? of.back() : of[1]);
      if (fits && shape.size() > 2) fits = shape[0] == tokens[0] && shape[1] == tokens[1];
      if (fits && shape.size() == 4) fits = shape[2] > 0 && of[1] % shape[2] == 0;
    }
    if (fits && masked) fits = in.back().dtype() == mx::bool_ && in.back().shape() == tokens;
    if (!fits) throw std::invalid_argument("[runner_scan] These inputs are not those of the rule.");
  }

  /* An input as float32, with zeros after each row up to the width of vectors if its rows lie along them. */
  Floats floats(array a, bool vector, int heads, mx::cpu::CommandEncoder &encoder) const {
    const int axes = (int)a.ndim();
    mx::Strides strides = a.strides();
    const float *p = a.data<float>();
    const size_t n = a.shape(-1), width = table->width;
    if (a.dtype() != mx::float32 || (!has_rows(a) && (axes == 4 || !by_heads())) || (vector && n % width)) {
      array x = with_rows(a, encoder);
      const size_t room = (n + width - 1) / width * width;
      strides.back() = 1;
      int64_t stride = room;
      for (int i = axes - 2; i >= 0; stride *= a.shape(i--)) strides[i] = stride;
      array copy = temporary({(int)stride}, mx::float32, encoder);
      encoder.dispatch([rows = Rows(x), type = type_of(x.dtype()), n, room, to = copy.data<float>(), table = table] {
        for (size_t row = 0; row < rows.count; row++) {
          table->to_float(rows[row], type, n, to + row * room);
          memset(to + row * room + n, 0, sizeof(float) * (room - n));
        }
      });
      p = copy.data<float>();
    }
    if (axes == 1) return {p, 0, 0, rule == DECAY ? strides[0] : 0, 1};
    if (axes == 2) return {p, 0, strides[0], 0, 1}; /* rows in place of tokens */
    return {p, strides[0], strides[1], by_heads() ? strides[2] : 0, by_heads() ? heads / a.shape(2) : 1};
  }

  void run(const Arrays &in, Arrays &out, mx::cpu::CommandEncoder &encoder) const {
    const array &x = values(in);
    for (array &other : out)
      if (&other.inputs() != &in) other.inputs().clear(); /* or the state would count as used by each output */
    const bool in_place = state(in).is_donatable() && state(in).flags().row_contiguous;
    const array before = whole(state(in), encoder);
    allocate(out[0]);
    if (in_place) out[1].copy_shared_buffer(before);
    else allocate(out[1]);
    Scan a{};
    a.rule = rule, a.length = x.shape(1), a.type = type_of(type);
    a.heads = by_heads() ? before.shape(1) : 1, a.rows = before.shape(by_heads() ? 2 : 1), a.columns = rule == LINEAR ? 1 : before.shape(-1);
    a.channels = rule == WKV || rule == SELECTIVE || (rule == DELTA && in[3].ndim() == 4);
    for (size_t i = 0; i < inputs(); i++) {
      const bool is_value = &in[i] == &x, scalars = in[i].ndim() < (by_heads() ? 4 : 2) || rule == LINEAR || (rule == SELECTIVE && i < 2);
      a.in[i] = floats(in[i], !is_value && !scalars, a.heads, encoder);
    }
    for (size_t i = inputs(); i < 6; i++) a.in[i] = a.in[0];
    const int batch = x.shape(0);
    const bool *mask = masked ? whole(in.back(), encoder).data<bool>() : nullptr;
    a.before = before.data<float>(), a.after = out[1].data<float>(), a.y = out[0].data<char>();
    a.token_bytes = out[0].nbytes() / batch / a.length, a.batch_bytes = out[0].nbytes() / batch;
    encoder.dispatch([a, batch, mask, table = table]() mutable {
      std::vector<int> tokens(batch * (size_t)a.length), counts(batch, 0);
      for (int b = 0; b < batch; b++)
        for (int t = 0; t < a.length; t++)
          if (!mask || mask[b * (size_t)a.length + t]) tokens[b * (size_t)a.length + counts[b]++] = t;
      a.tokens = tokens.data(), a.counts = counts.data();
      const int rows = a.rule == LINEAR ? 256 : SCANNED * a.columns > FLOATS_AT_ONCE ? std::max(4, FLOATS_AT_ONCE / a.columns / 4 * 4) : SCANNED, parts = (a.rows + rows - 1) / rows;
      const size_t work = (size_t)batch * a.heads * a.length * a.rows * a.columns * 4;
      each(batch * a.heads * parts, shares((size_t)batch * a.length, work), [&](int i) {
        const int from = i % parts * rows, head = i / parts % a.heads;
        table->scan(a, i / parts / a.heads, head, from, std::min(from + rows, a.rows), scratch(SCANNED * (size_t)(a.columns + table->width)));
      });
    });
  }
};

/* Decays of tokens, and beside them their steps or the sigmoids of another input, times a factor.
 *
 * Inputs: x [B, T, H] or [B, T, H, D], its bias, the logarithms of rates, limits [4] (least and most step, bound, factor),
 * and the other input if there is one. */
struct Gating {
  static constexpr const char *name = "FastGates";
  const Kernels *table;
  bool operator==(const Gating &) const = default;

  std::vector<mx::Shape> shapes(const Arrays &in) const { return {in[0].shape(), in.back().ndim() == 1 ? in[0].shape() : in.back().shape()}; }
  std::vector<mx::Dtype> types() const { return {mx::float32, mx::float32}; }
  void check(const Arrays &in) const {
    bool fits = (in.size() == 4 || in.size() == 5) && in[0].ndim() >= 3 && in[0].ndim() <= 4 && in[0].size() > 0 && in[3].size() == 4 && in[3].dtype() == mx::float32;
    const size_t n = fits ? in[0].size() / in[0].shape(0) / in[0].shape(1) : 0;
    for (size_t i = 0; fits && i < in.size(); i++) fits = is_float(in[i]) && (i < 1 || i > 2 || (in[i].size() > 0 && n % in[i].size() == 0));
    if (!fits) throw std::invalid_argument("[runner_gates] These inputs are not those of gates.");
  }

  void run(const Arrays &in, Arrays &out, mx::cpu::CommandEncoder &encoder) const {
    struct Given {
      const void *p;
      int type;
      size_t count;
    } given[2]; /* the bias, and the logarithms of rates */
    array x = with_rows(in[0], encoder), other = with_rows(in.back(), encoder), limits = whole(in[3], encoder);
    for (int i = 0; i < 2; i++) {
      array a = whole(in[1 + i], encoder);
      given[i] = {a.data<void>(), type_of(a.dtype()), a.size()};
    }
    const size_t width = x.shape(-1), heads = x.ndim() == 4 ? x.shape(2) : 1, all = heads * width;
    float *bias = room_for(3, all + table->width, encoder), *rates = bias + all + table->width, *spread = rates + all + table->width;
    allocate(out[0]), allocate(out[1]);
    encoder.dispatch([=, table = table, both = in.size() == 5, rows = Rows(x), others = Rows(other), count = x.size() / all, type = type_of(x.dtype()),
                      other_type = type_of(other.dtype()), n = (size_t)other.shape(-1), limits = limits.data<float>(), decays = out[0].data<float>(),
                      second = out[1].data<float>()] {
      for (int i = 0; i < 2; i++) { /* each number for as many as it has to serve */
        table->to_float(given[i].p, given[i].type, given[i].count, spread);
        for (size_t j = 0; j < all; j++) (i ? rates : bias)[j] = spread[j / (all / given[i].count)];
        memset((i ? rates : bias) + all, 0, sizeof(float) * table->width);
      }
      table->apply({1, {{EXP, 0, CONSTANT, 0}}}, rates, nullptr, rates, all);
      each_row(count, 64, count * all * 16, [&](size_t token) {
        float *floats = scratch(std::max(width, n) + table->width);
        for (size_t head = 0; head < heads; head++) {
          const size_t row = token * heads + head;
          const Gates a = {width, bias + head * width, rates + head * width, limits[0], limits[1], limits[2]};
          if (type != F32) table->to_float(rows[row], type, width, floats);
          table->gates(a, type != F32 ? floats : (const float *)rows[row], decays + row * width, both ? nullptr : second + row * width);
        }
        if (!both) return;
        table->to_float(others[token], other_type, n, floats);
        table->apply({1, {{SIGMOID, 0, CONSTANT, 0}}}, floats, nullptr, second + token * n, n);
        for (size_t j = 0; j < n; j++) second[token * n + j] *= limits[3];
      });
    });
  }
};

/* The rule of a kernel's name; -1 if it is another kernel. */
int rule_of(const std::string &name) {
  static const char *names[] = {"runner_scan_decay", "runner_scan_delta", "runner_scan_wkv", "runner_scan_selective", "runner_scan_linear"};
  const auto found = std::find(std::begin(names), std::end(names), name);
  return found == std::end(names) ? -1 : (int)(found - std::begin(names));
}

}  // namespace
