/* Products with packed weights: plain, gated, of packed keys and values; rows of embeddings. */
#pragma once
#include "functions.h"

namespace {

struct Packing {
  int bits, group, mode;
  bool operator==(const Packing &) const = default;

  static std::optional<Packing> of(std::optional<int> group, std::optional<int> bits, const std::string &mode) {
    if (mode == "affine") {
      Packing p{bits.value_or(4), group.value_or(64), AFFINE};
      bool known = p.bits >= 2 && p.bits <= 8 && p.bits != 7 && (p.group == 32 || p.group == 64 || p.group == 128);
      return known ? std::optional(p) : std::nullopt;
    }
    Packing p = mode == "mxfp4" ? Packing{4, 32, MXFP4} : mode == "mxfp8" ? Packing{8, 32, MXFP8} : Packing{4, 16, NVFP4};
    bool known = (p.mode != NVFP4 || mode == "nvfp4") && group.value_or(p.group) == p.group && bits.value_or(p.bits) == p.bits;
    return known ? std::optional(p) : std::nullopt;
  }
  const char *mode_name() const { return mode == AFFINE ? "affine" : mode == MXFP4 ? "mxfp4" : mode == MXFP8 ? "mxfp8" : "nvfp4"; }

  bool fits(const array &w, const array &scales, const Maybe &biases, size_t k) const {
    if (w.dtype() != mx::uint32 || w.ndim() != scales.ndim() || w.ndim() < 2) return false;
    for (int i = 0; i + 1 < (int)w.ndim(); i++)
      if (w.shape(i) != scales.shape(i)) return false;
    if ((size_t)w.shape(-1) * 32 != k * bits || (size_t)scales.shape(-1) * group != k) return false;
    if (mode != AFFINE) return !biases && scales.dtype() == mx::uint8;
    return biases && biases->shape() == scales.shape() && is_float(scales) && biases->dtype() == scales.dtype();
  }

  /* A product with these weights, of no rows yet. */
  Product product(const array &w, const array &scales, const void *biases, size_t k, array &out) const {
    Product p{};
    p.k = p.ldx = k;
    p.n = w.shape(-2);
    p.bits = bits, p.group = group, p.mode = mode;
    p.w = w.data<uint8_t>(), p.scales = scales.data<void>(), p.biases = biases, p.scale_type = type_of(scales.dtype());
    p.out = out.data<void>(), p.out_type = type_of(out.dtype());
    return p;
  }
};

/* The outputs that one call of a kernel computes: so many that starting it costs little, so few that threads can share,
 * the fewer the shorter a product is, as the last call leaves the other threads idle. */
size_t outputs_at_once(const Product &p) {
  size_t fitting = p.m <= FEW ? ((size_t)1 << 16) / p.k : std::min<size_t>(UNPACKED / p.k, p.m < 48 ? 64 : 96);
  return std::max<size_t>(1, fitting / kernels->width) * kernels->width;
}
int parts_of(const Product &p) { return (int)((p.n + outputs_at_once(p) - 1) / outputs_at_once(p)); }
void compute_part(const Product &p, int part) {
  size_t from = part * outputs_at_once(p), to = std::min(from + outputs_at_once(p), p.n);
  Product mine = p;
  mine.ahead = many * outputs_at_once(p); /* the part that this thread is likely to take next */
  kernels->product(mine, from, to, scratch(outputs_at_once(p) * p.k));
}

/* Of two products that are gated: a function of the first, times one of the second. */
struct Gate {
  Formula first{}, second{};
  bool operator==(const Gate &) const = default;

  explicit operator bool() const { return first.count; }
  array original(const array &a, const array &b, mx::StreamOrDevice s) const { return own_multiply(computed(first, a, s), computed(second, b, s), s); }
};

/* Computes a part of a product, gated by the second one if that has rows: all float32 then. */
void compute_gated(const Product &p, const Product &second, const Gate &gate, int part) {
  compute_part(p, part);
  if (!second.m) return;
  compute_part(second, part);
  const size_t from = part * outputs_at_once(p), count = std::min(outputs_at_once(p), p.n - from);
  for (size_t i = 0; i < p.m; i++) {
    const size_t at = (p.order ? p.order[i] : i) * p.n + from;
    float *x = (float *)p.out + at, *factor = (float *)second.out + at;
    if (gate.second.count) kernels->apply(gate.second, factor, nullptr, factor, count);
    kernels->apply(gate.first, x, factor, x, count);
  }
}

/* A product with packed weights, and what follows it in a forward: a bias and a residual that are added, or a gate.
 *
 * Inputs: x; then the weights, scales and biases of one product, or of two that are gated; then the bias and the residual. */
struct PackedProduct {
  static constexpr const char *name = "FastQuantizedMatmul";
  Packing packing;
  MaybeAsked asked;
  enum { PLAIN, ADDED, GATED } form = PLAIN;
  bool biased = false;
  Gate gate{};
  bool operator==(const PackedProduct &) const = default;

  int parts() const { return packing.mode == AFFINE ? 3 : 2; }
  array original(const Arrays &in, mx::StreamOrDevice s) const {
    auto multiply = [&](int at) {
      return own_quantized_matmul(in[0], in[at], in[at + 1], maybe(in, at + 2, parts() == 3), true, packing.group, packing.bits, packing.mode_name(), s);
    };
    array y = multiply(1);
    if (biased) y = own_add(y, in[1 + parts()], s);
    if (form == ADDED) return own_add(y, in.back(), s);
    return form == GATED ? gate.original(y, multiply(1 + parts()), s) : y;
  }
  mx::Shape shape(const Arrays &in) const {
    auto shape = in[0].shape();
    shape.back() = in[1].shape(0);
    return shape;
  }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array x = with_rows(in[0], encoder);
    auto product = [&](int at, array &out) {
      array w = whole(in[at], encoder), scales = whole(in[at + 1], encoder);
      return packing.product(w, scales, parts() == 3 ? whole(in[at + 2], encoder).data<void>() : nullptr, x.shape(-1), out);
    };
    Product p = product(1, out), gated{};
    Rows rows(x);
    p.m = asked ? asked->rows.size() : rows.count;
    if (asked) p.order = asked->rows.data();
    float *floats = room_for(p.m, p.k, encoder);
    p.x = floats;
    if (biased) p.bias = whole(in[1 + parts()], encoder).data<float>();
    if (form == ADDED) p.added = whole(in.back(), encoder).data<float>();
    if (form == GATED) {
      array second = temporary(out.shape(), mx::float32, encoder);
      gated = product(1 + parts(), second);
      gated.m = p.m, gated.x = p.x, gated.order = p.order;
    }
    encoder.dispatch([p, gated, gate = gate, rows, floats, type = type_of(x.dtype()), asked = asked, row_bytes = out.itemsize() * p.n] {
      each((int)p.m, shares(p.m, p.m * p.k), [&](int i) { kernels->take(p, rows[p.order ? p.order[i] : i], type, floats + i * p.k); });
      for (int i = 0; asked && i < asked->batch; i++)
        memset((char *)p.out + row_bytes * (i * asked->length + asked->counts[i]), 0, row_bytes * (asked->length - asked->counts[i]));
      each(parts_of(p), shares(p.m, p.m * p.n * p.k), [&](int part) { compute_gated(p, gated, gate, part); });
    });
  }
};

/* The product of matrices of x with packed ones, the leading axes of each broadcast to the other's: of keys and values
 * that a cache keeps packed, or of latents with the weights of each head. Not transposed, packed rows are added up, each
 * times its weight. */
struct BatchedProduct {
  static constexpr const char *name = "FastBatchedProduct";
  Packing packing;
  bool transpose;
  bool operator==(const BatchedProduct &) const = default;

  array original(const Arrays &in, mx::StreamOrDevice s) const {
    return own_quantized_matmul(in[0], in[1], in[2], maybe(in, 3), transpose, packing.group, packing.bits, packing.mode_name(), s);
  }
  mx::Shape batch(const Arrays &in) const {
    auto leading = [](const array &a) { return mx::Shape(a.shape().begin(), a.shape().end() - 2); };
    return mx::broadcast_shapes(leading(in[0]), leading(in[1]));
  }
  mx::Shape shape(const Arrays &in) const {
    auto shape = batch(in);
    shape.push_back(in[0].shape(-2));
    shape.push_back(transpose ? in[1].shape(-2) : in[1].shape(-1) * 32 / packing.bits);
    return shape;
  }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array x = transpose ? with_rows(in[0], encoder) : with_matrices(in[0], encoder);
    array w = with_matrices(in[1], encoder), scales = with_matrices(in[2], encoder);
    Maybe biases = in.size() > 3 ? Maybe(with_matrices(in[3], encoder)) : std::nullopt;
    Product p = packing.product(w, scales, biases ? biases->data<void>() : nullptr, transpose ? x.shape(-1) : out.shape(-1), out);
    const size_t w_bytes = *matrix_stride(w) * 4, scale_bytes = *matrix_stride(scales) * scales.itemsize(), bias_bytes = biases ? *matrix_stride(*biases) * biases->itemsize() : 0;
    const auto of_x = numbers_of(x, batch(in)), of_w = numbers_of(w, batch(in));
    auto weighted = [=](Product p, uint32_t number) {
      p.w += number * w_bytes;
      p.scales = (const char *)p.scales + number * scale_bytes;
      if (p.biases) p.biases = (const char *)p.biases + number * bias_bytes;
      return p;
    };
    const size_t rows = x.shape(-2), work = of_x.size() * rows * p.n * p.k;
    if (!transpose) {
      p.ldx = p.n;
      encoder.dispatch([=, x = x.data<float>(), x_stride = *matrix_stride(x)] {
        std::vector<Product> jobs;
        for (size_t first = 0, end; first < of_x.size(); first = end) { /* matrices that follow each other, for the same weights */
          for (end = first + 1; end < of_x.size() && of_w[end] == of_w[first] && of_x[end] == of_x[end - 1] + 1 && x_stride == (int64_t)(rows * p.n);) end++;
          for (size_t row = 0; row < (end - first) * rows; row += ROWS_AT_ONCE) {
            Product part = weighted(p, of_w[first]);
            part.m = std::min<size_t>(ROWS_AT_ONCE, (end - first) * rows - row);
            part.x = x + of_x[first] * x_stride + row * p.n;
            part.out = (float *)p.out + (first * rows + row) * p.k;
            jobs.push_back(part);
          }
        }
        each((int)jobs.size(), shares(rows, work), [&](int i) { kernels->weigh(jobs[i], scratch(KEYS * (p.k + ROWS_AT_ONCE))); });
      });
      return;
    }
    Rows from(x);
    float *floats = room_for(from.count, p.k, encoder);
    encoder.dispatch([=] {
      /* By their weights; matrices of x are taken once, those for the same weights one after the other. */
      std::vector<uint32_t> sorted(of_w.size()), place(from.count / rows, UINT32_MAX), order;
      std::iota(sorted.begin(), sorted.end(), 0);
      std::stable_sort(sorted.begin(), sorted.end(), [&](uint32_t a, uint32_t b) { return of_w[a] < of_w[b]; });
      uint32_t placed = 0;
      for (uint32_t i : sorted) {
        if (place[of_x[i]] == UINT32_MAX) place[of_x[i]] = placed++;
        for (size_t row = 0; row < rows; row++) order.push_back(i * rows + row);
      }
      std::vector<std::pair<Product, int>> jobs;
      for (size_t first = 0, end; first < sorted.size(); first = end) {
        auto follows = [&](size_t i) { return of_w[sorted[i]] == of_w[sorted[first]] && place[of_x[sorted[i]]] == place[of_x[sorted[i - 1]]] + 1; };
        for (end = first + 1; end < sorted.size() && follows(end);) end++;
        Product mine = weighted(p, of_w[sorted[first]]);
        mine.m = (end - first) * rows;
        mine.x = floats + place[of_x[sorted[first]]] * rows * p.k;
        mine.order = order.data() + first * rows;
        for (int part = 0; part < parts_of(mine); part++) jobs.push_back({mine, part});
      }
      each((int)from.count, shares(rows, from.count * p.k), [&](int i) { kernels->take(p, from[i], F32, floats + (place[i / rows] * rows + i % rows) * p.k); });
      each((int)jobs.size(), shares(rows, work), [&](int i) { compute_part(jobs[i].first, jobs[i].second); });
    });
  }
};

/* The product with weights that are not packed, by the BLAS that MLX uses. Inputs: x, the weights; then a bias. */
struct PlainProduct {
  static constexpr const char *name = "FastMatmul";
  bool operator==(const PlainProduct &) const = default;
  using Sgemm = void(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
  enum { ROW_MAJOR = 101, AS_IT_IS = 111, TRANSPOSED = 112 }; /* CBLAS's */

  static Sgemm *sgemm() {
    static Sgemm *const found = (Sgemm *)dlsym(RTLD_DEFAULT, "cblas_sgemm");
    return found;
  }
  array original(const Arrays &in, mx::StreamOrDevice s) const {
    array w = mx::transpose(in[1], s);
    return in.size() > 2 ? own_addmm(in[2], in[0], w, 1, 1, s) : own_matmul(in[0], w, s);
  }
  mx::Shape shape(const Arrays &in) const {
    auto shape = in[0].shape();
    shape.back() = in[1].shape(0);
    return shape;
  }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array x = whole(in[0], encoder), w = whole(in[1], encoder);
    const float *bias = in.size() > 2 ? whole(in[2], encoder).data<float>() : nullptr;
    encoder.dispatch([bias, m = (int)(x.size() / x.shape(-1)), n = w.shape(0), k = w.shape(1), x = x.data<float>(), w = w.data<float>(), out = out.data<float>()] {
      for (int row = 0; bias && row < m; row++) memcpy(out + (size_t)row * n, bias, sizeof(float) * n);
      sgemm()(ROW_MAJOR, AS_IT_IS, TRANSPOSED, m, n, k, 1, x, k, w, k, bias ? 1 : 0, out, n);
    });
  }
};

/* The rows of an embedding. */
struct UnpackedRows {
  static constexpr const char *name = "FastDequantize";
  Packing packing;
  mx::Dtype type;
  bool operator==(const UnpackedRows &) const = default;

  array original(const Arrays &in, mx::StreamOrDevice s) const {
    return own_dequantize(in[0], in[1], maybe(in, 2), packing.group, packing.bits, packing.mode_name(), std::nullopt, type, s);
  }
  mx::Shape shape(const Arrays &in) const {
    auto shape = in[0].shape();
    shape.back() = in[1].shape(-1) * packing.group;
    return shape;
  }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array w = whole(in[0], encoder), scales = whole(in[1], encoder);
    const void *biases = in.size() > 2 ? whole(in[2], encoder).data<void>() : nullptr;
    Product p = packing.product(w, scales, biases, out.shape(-1), out);
    const size_t rows = out.size() / p.k;
    encoder.dispatch([p, rows] {
      each((int)rows, shares(rows, rows * p.k), [&](int row) {
        if (p.out_type == F32) return kernels->unpack(p, row, (float *)p.out + row * p.k);
        float *room = scratch(p.k);
        kernels->unpack(p, row, room);
        kernels->from_float(room, p.k, (char *)p.out + 2 * row * p.k, p.out_type);
      });
    });
  }
};

}  // namespace
