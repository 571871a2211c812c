/* Operations on rows and numbers: norms, rotary positions, functions, softmax, joins. */
#pragma once
#include "operation.h"

namespace {

/* A function of numbers by libmlx's operations. */
array computed(const Formula &formula, const array &x, mx::StreamOrDevice s) {
  Arrays made = {x};
  for (int i = 0; i < formula.count; i++) {
    const Step &step = formula.steps[i];
    auto input = [&](int place) { return place == CONSTANT ? array(step.constant) : made[place]; };
    if (step.what == SOFTPLUS) {
      made.push_back(own_logaddexp(input(step.first), array(0.0f), s));
    } else if (step.what < ADD) {
      const auto own = std::array{own_sigmoid, own_tanh, own_exp, own_expm1, own_erf}[step.what];
      made.push_back(own(input(step.first), s));
    } else {
      const auto own = std::array{own_add, own_subtract, own_multiply, own_divide, own_maximum, own_minimum}[step.what - ADD];
      made.push_back(own(input(step.first), input(step.second), s));
    }
  }
  return made.back();
}

/* Norms of rows, times a function of a weight, a number, and a function of another array; or plus another array. */
struct NormedRows {
  static constexpr const char *name = "FastRMSNorm";
  float eps;
  bool weighted;
  float factor = 1;
  Formula gate{}, of_weight{}; /* the functions of the last input and of the weight; no steps: none */
  bool added = false;          /* the last input */
  bool operator==(const NormedRows &) const = default;

  bool plain() const { return factor == 1 && !gate.count && !added; }
  array original(const Arrays &in, mx::StreamOrDevice s) const {
    array y = own_rms_norm(in[0], weighted ? Maybe(computed(of_weight, in[1], s)) : std::nullopt, eps, s);
    if (factor != 1) y = own_multiply(y, array(factor), s);
    if (added) y = own_add(y, in.back(), s);
    return gate.count ? own_multiply(computed(gate, in.back(), s), y, s) : y;
  }
  mx::Shape shape(const Arrays &in) const { return in[0].shape(); }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array x = with_rows(in[0], encoder), others = gate.count || added ? with_rows(in.back(), encoder) : x;
    array weight = weighted ? whole(in[1], encoder) : x;
    float *weights = of_weight.count ? room_for(1, x.shape(-1), encoder) : nullptr;
    encoder.dispatch([self = *this, rows = Rows(x), others = Rows(others), n = (size_t)x.shape(-1), type = type_of(x.dtype()), weight = weighted ? weight.data<void>() : nullptr,
                      weight_type = type_of(weight.dtype()), weights, out = out.data<char>(), out_type = type_of(out.dtype()), bytes = out.itemsize() * x.shape(-1)] {
      if (weights) kernels->apply(self.of_weight, (const float *)weight, nullptr, weights, n);
      each_row(rows.count, 32, rows.count * n, [&](size_t row) {
        char *normed = out + row * bytes;
        kernels->rms_norm(rows[row], type, n, weights ? weights : weight, weight_type, self.eps, self.factor, self.added ? (const float *)others[row] : nullptr, normed, out_type);
        if (self.gate.count) kernels->apply(self.gate, (const float *)others[row], (float *)normed, (float *)normed, n);
      });
    });
  }
};

struct CentredRows {
  static constexpr const char *name = "FastLayerNorm";
  float eps;
  bool weight, bias;
  bool operator==(const CentredRows &) const = default;

  array original(const Arrays &in, mx::StreamOrDevice s) const { return own_layer_norm(in[0], maybe(in, 1, weight), maybe(in, in.size() - 1, bias), eps, s); }
  mx::Shape shape(const Arrays &in) const { return in[0].shape(); }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array x = with_rows(in[0], encoder);
    const float *weights = weight ? whole(in[1], encoder).data<float>() : nullptr, *biases = bias ? whole(in.back(), encoder).data<float>() : nullptr;
    encoder.dispatch([eps = eps, rows = Rows(x), n = (size_t)x.shape(-1), weights, biases, out = out.data<float>()] {
      each_row(rows.count, 32, rows.count * n, [&](size_t row) { kernels->layer_norm((const float *)rows[row], n, weights, biases, eps, out + row * n); });
    });
  }
};

/* The cosines and sines of one forward: made once for all its layers that turn alike. */
struct Angles {
  int half = 0, length = 0;
  float base = 0, scale = 0;
  std::vector<int> offsets;
  std::vector<float> periods, cosines, sines;

  static const Angles &of(int half, int length, float base, float scale, std::vector<int> offsets, std::vector<float> periods) {
    static thread_local Angles kept[2];
    static thread_local int oldest = 0;
    for (auto &a : kept)
      if (a.half == half && a.length == length && a.base == base && a.scale == scale && a.offsets == offsets && a.periods == periods) return a;
    auto &a = kept[oldest];
    oldest ^= 1;
    a = {half, length, base, scale, std::move(offsets), std::move(periods), {}, {}};
    std::vector<float> speeds(half);
    for (int i = 0; i < half; i++) speeds[i] = a.periods.empty() ? (float)std::exp((float)-i * (std::log(base) / half)) : 1.0f / a.periods[i];
    for (int offset : a.offsets)
      for (int i = 0; i < length; i++)
        for (float speed : speeds) {
          const float angle = ((float)i + (float)offset) * scale * speed;
          a.cosines.push_back(std::cos(angle));
          a.sines.push_back(std::sin(angle));
        }
    return a;
  }
};

struct TurnedRows {
  static constexpr const char *name = "FastRoPE";
  int dims;
  bool traditional, has_base;
  float base, scale;
  bool operator==(const TurnedRows &) const = default;

  array original(const Arrays &in, mx::StreamOrDevice s) const {
    return own_rope(in[0], dims, traditional, has_base ? std::optional(base) : std::nullopt, scale, in[1], maybe(in, 2), s);
  }
  mx::Shape shape(const Arrays &in) const { return in[0].shape(); }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array x = with_rows(in[0], encoder), offsets = whole(in[1], encoder);
    const float *periods = in.size() > 2 ? whole(in[2], encoder).data<float>() : nullptr;
    encoder.dispatch([self = *this, rows = Rows(x), d = x.shape(-1), length = x.shape(-2), batch = x.shape(0), type = type_of(x.dtype()), out = out.data<char>(),
                      bytes = out.itemsize() * x.shape(-1), offsets = offsets.data<int>(), count = offsets.size(), periods] {
      const int half = self.dims / 2;
      auto &a = Angles::of(half, length, self.base, self.scale, {offsets, offsets + count}, periods ? std::vector<float>(periods, periods + half) : std::vector<float>());
      const size_t rows_each = rows.count / batch;
      for (size_t row = 0; row < rows.count; row++) {
        const size_t at = ((count > 1 ? row / rows_each : 0) * length + row % length) * half;
        kernels->rope(rows[row], type, d, self.dims, self.traditional, &a.cosines[at], &a.sines[at], out + row * bytes);
      }
    });
  }
};

/* A function of each number, times a factor if there is a second input. */
struct Elementwise {
  static constexpr const char *name = "FastFunction";
  static constexpr bool in_place = true;
  Formula formula;
  bool operator==(const Elementwise &) const = default;

  array original(const Arrays &in, mx::StreamOrDevice s) const {
    array y = computed(formula, in[0], s);
    return in.size() > 1 ? own_multiply(y, in[1], s) : y;
  }
  mx::Shape shape(const Arrays &in) const { return in[0].shape(); }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array x = whole(in[0], encoder);
    const float *factor = in.size() > 1 ? whole(in[1], encoder).data<float>() : nullptr;
    encoder.dispatch([formula = formula, x = x.data<float>(), factor, out = out.data<float>(), n = x.size()] {
      const size_t part = 1 << 14; /* a multiple of every width */
      each((int)((n + part - 1) / part), n > part && many > 1 ? WHOLLY : ALONE, [&](int i) {
        const size_t from = i * part;
        kernels->apply(formula, x + from, factor ? factor + from : nullptr, out + from, std::min(part, n - from));
      });
    });
  }
};

/* Rows, each times a function of a number of its own, and what is added to them. Inputs: the rows, the numbers [..., 1];
 * then what is added. */
struct ScaledRows {
  static constexpr const char *name = "FastScaledRows";
  Formula formula;
  bool operator==(const ScaledRows &) const = default;

  array original(const Arrays &in, mx::StreamOrDevice s) const {
    array y = own_multiply(computed(formula, in[1], s), in[0], s);
    return in.size() > 2 ? own_add(in[2], y, s) : y;
  }
  mx::Shape shape(const Arrays &in) const { return in[0].shape(); }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array x = with_rows(in[0], encoder), numbers = whole(in[1], encoder);
    const float *added = in.size() > 2 ? whole(in[2], encoder).data<float>() : nullptr;
    encoder.dispatch([formula = formula, rows = Rows(x), n = (size_t)x.shape(-1), numbers = numbers.data<float>(), added, out = out.data<float>()] {
      each_row(rows.count, 32, rows.count * n, [&](size_t row) {
        float factor;
        kernels->apply(formula, numbers + row, nullptr, &factor, 1);
        kernels->mix((const float *)rows[row], &factor, 1, added ? added + row * n : nullptr, out + row * n, n);
      });
    });
  }
};

struct RowSoftmax {
  static constexpr const char *name = "FastSoftmax";
  bool operator==(const RowSoftmax &) const = default;

  array original(const Arrays &in, mx::StreamOrDevice s) const { return own_softmax(in[0], {-1}, true, s); }
  mx::Shape shape(const Arrays &in) const { return in[0].shape(); }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array x = with_rows(in[0], encoder);
    encoder.dispatch([rows = Rows(x), n = (size_t)x.shape(-1), out = out.data<float>()] {
      each((int)rows.count, shares(rows.count, rows.count * n * 4), [&](int row) { kernels->softmax((const float *)rows[row], out + row * n, n); });
    });
  }
};

/* Arrays one after the other along an axis, copied in whole pieces; MLX copies number by number. The first and the last
 * rows of the result may be left out. */
struct Joined {
  static constexpr const char *name = "FastConcatenate";
  int axis, first = 0, last = 0; /* rows that are left out */
  bool operator==(const Joined &) const = default;

  array original(const Arrays &in, mx::StreamOrDevice s) const {
    array all = own_concatenate(in, axis, s);
    mx::Shape start(all.ndim(), 0), stop = all.shape();
    start[axis] = first, stop[axis] -= last;
    return first + last ? own_slice(all, start, stop, mx::Shape(all.ndim(), 1), s) : all;
  }
  mx::Shape shape(const Arrays &in) const {
    auto shape = in[0].shape();
    for (size_t i = 1; i < in.size(); i++) shape[axis] += in[i].shape(axis);
    shape[axis] -= first + last;
    return shape;
  }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    struct Part {
      Rows rows;
      size_t count, bytes, from, taken; /* rows that follow each other, the bytes of one, and those that the result has */
      bool gapless;
    };
    std::vector<Part> parts;
    int place = -first, end = out.shape(axis); /* where a part begins in the result, and the last one ends */
    for (const array &a : in) {
      const int length = a.shape(axis), from = std::max(0, -place), to = std::min(length, end - place);
      place += length;
      if (from >= to) continue;
      array x = with_rows(a, encoder);
      const int row = (int)x.ndim() - 1;
      Part part{Rows(x), 1, x.itemsize() * x.shape(row), 0, 1, true};
      for (int i = row - 1; i >= axis; part.count *= x.shape(i--)) part.gapless = part.gapless && (x.shape(i) == 1 || x.strides()[i] == (int64_t)part.count * x.shape(row));
      if (axis < row) part.from = part.count / length * from, part.taken = part.count / length * (to - from);
      parts.push_back(part);
    }
    int count = 1;
    for (int i = 0; i < axis; i++) count *= out.shape(i);
    encoder.dispatch([parts = std::move(parts), to = out.data<char>(), count, step = out.nbytes() / count] {
      each(count, shares(BRIEF_ROWS + 1, count * step / sizeof(float)), [&](int i) {
        char *p = to + i * step;
        for (const Part &part : parts) {
          const size_t pieces = part.gapless ? 1 : part.taken, bytes = part.taken / pieces * part.bytes;
          for (size_t piece = 0; piece < pieces; piece++, p += bytes) memcpy(p, part.rows[i * part.count + part.from + piece], bytes);
        }
      });
    });
  }
};

}  // namespace
