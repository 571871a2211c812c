/* Experts: which ones a token has, their weights in its sum, and their products. */
#pragma once
#include "products.h"

namespace {

/* The numbers of the experts of each row: a part of the order in which `argpartition` leaves them, by keys that are a
 * function of the input, or one of such a function with a bias. Inputs: x, then the bias. */
struct Choice {
  static constexpr const char *name = "FastChoice";
  int kth, first = 0, count; /* those taken of each row */
  Formula before{}, after{};
  bool biased = false;
  bool operator==(const Choice &) const = default;

  array original(const Arrays &in, mx::StreamOrDevice s) const {
    array keys = computed(before, in[0], s);
    if (biased) keys = computed(after, own_add(keys, in[1], s), s);
    array all = own_argpartition(keys, kth, -1, s);
    mx::Shape start(all.ndim(), 0), stop = all.shape();
    start.back() = first, stop.back() = first + count;
    return own_slice(all, start, stop, mx::Shape(all.ndim(), 1), s);
  }
  mx::Shape shape(const Arrays &in) const {
    auto shape = in[0].shape();
    shape.back() = count;
    return shape;
  }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array x = with_rows(in[0], encoder);
    const float *bias = biased ? whole(in[1], encoder).data<float>() : nullptr;
    encoder.dispatch([self = *this, rows = Rows(x), n = (size_t)x.shape(-1), bias, out = out.data<uint32_t>()] {
      each((int)rows.count, shares(rows.count, rows.count * n * 16), [&](int row) {
        float *keys = scratch(2 * n);
        uint32_t *order = (uint32_t *)(keys + n);
        memcpy(keys, rows[row], sizeof(float) * n);
        kernels->apply(self.before, keys, nullptr, keys, n);
        for (size_t i = 0; bias && i < n; i++) keys[i] += bias[i];
        if (bias) kernels->apply(self.after, keys, nullptr, keys, n);
        std::iota(order, order + n, 0);
        std::nth_element(order, order + self.kth, order + n, [&](uint32_t a, uint32_t b) { /* as MLX: NaN last */
          if (std::isnan(keys[a])) return false;
          return std::isnan(keys[b]) || keys[a] < keys[b] || (keys[a] == keys[b] && a < b);
        });
        memcpy(out + row * self.count, order + self.first, sizeof(uint32_t) * self.count);
      });
    });
  }
};

/* The numbers of a row, or of a function of it, at the places that were chosen; their softmax; their sum; or their shares
 * in a function of that, times a factor. Inputs: x, the choice. */
struct ChosenNumbers {
  static constexpr const char *name = "FastChosenNumbers";
  Formula before{};
  enum { PLAIN, SOFTMAX, SUM, SHARES } form = PLAIN;
  Formula of_sum{};
  float factor = 1;
  bool operator==(const ChosenNumbers &) const = default;

  array original(const Arrays &in, mx::StreamOrDevice s) const {
    array y = own_take_along_axis(computed(before, in[0], s), in[1], -1, s);
    if (form == SOFTMAX) return own_softmax(y, {-1}, true, s);
    if (form == PLAIN) return y;
    array sum = own_sum(y, {-1}, true, s);
    if (form == SUM) return sum;
    y = own_divide(y, computed(of_sum, sum, s), s);
    return factor == 1 ? y : own_multiply(y, array(factor), s);
  }
  mx::Shape shape(const Arrays &in) const {
    auto shape = in[1].shape();
    if (form == SUM) shape.back() = 1;
    return shape;
  }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array x = with_rows(in[0], encoder), chosen = whole(in[1], encoder);
    encoder.dispatch([self = *this, rows = Rows(x), n = (uint32_t)x.shape(-1), chosen = chosen.data<uint32_t>(), count = (size_t)chosen.shape(-1), out = out.data<float>()] {
      for (size_t row = 0; row < rows.count; row++) {
        float sum = 0, *numbers = self.form == SUM ? scratch(count) : out + row * count;
        for (size_t i = 0; i < count; i++) numbers[i] = ((const float *)rows[row])[std::min(chosen[row * count + i], n - 1)];
        kernels->apply(self.before, numbers, nullptr, numbers, count);
        if (self.form == SOFTMAX) kernels->softmax(numbers, numbers, count);
        if (self.form < SUM) continue;
        for (size_t i = 0; i < count; i++) sum += numbers[i];
        if (self.form == SUM) out[row] = sum;
        kernels->apply(self.of_sum, &sum, nullptr, &sum, 1);
        for (size_t i = 0; self.form == SHARES && i < count; i++) numbers[i] = numbers[i] / sum * self.factor;
      }
    });
  }
};

/* Choices as Phi MoE makes them: one expert after the other, each with its weight among those left whose numbers are close
 * to its own. Inputs: x, and how close [1]. Outputs: the experts, and their weights. */
struct Sparsemixer {
  static constexpr const char *name = "FastSparsemixer";
  const Kernels *table;
  int count = 0;
  bool operator==(const Sparsemixer &) const = default;

  std::vector<mx::Shape> shapes(const Arrays &in) const {
    auto shape = in[0].shape();
    shape.back() = count;
    return {shape, shape};
  }
  std::vector<mx::Dtype> types() const { return {mx::uint32, mx::float32}; }
  void check(const Arrays &in) const {
    const bool fits = in.size() == 2 && in[0].dtype() == mx::float32 && in[0].ndim() >= 1 && in[0].size() > 0 && count <= in[0].shape(-1) && in[1].size() == 1 && in[1].dtype() == mx::float32;
    if (!fits) throw std::invalid_argument("[runner_sparsemixer] These inputs are not those of a choice.");
  }
  void run(const Arrays &in, Arrays &out, mx::cpu::CommandEncoder &encoder) const {
    array x = with_rows(in[0], encoder);
    allocate(out[0]), allocate(out[1]);
    encoder.dispatch([self = *this, rows = Rows(x), n = (size_t)x.shape(-1), close = whole(in[1], encoder).data<float>(), chosen = out[0].data<uint32_t>(), weights = out[1].data<float>()] {
      each_row(rows.count, 64, rows.count * n * self.count * 16, [&](size_t row) {
        const float *numbers = (const float *)rows[row];
        float *left = scratch(2 * n), *band = left + n;
        memcpy(left, numbers, sizeof(float) * n);
        for (int i = 0; i < self.count; i++) {
          const size_t best = std::max_element(left, left + n) - left; /* the first of several */
          const float top = left[best];
          for (size_t j = 0; j < n; j++) band[j] = (top - numbers[j]) / std::max(std::abs(numbers[j]), top) > *close ? -INFINITY : left[j];
          self.table->softmax(band, band, n);
          chosen[row * self.count + i] = best;
          weights[row * self.count + i] = band[best];
          left[best] = -INFINITY;
        }
      });
    });
  }
};

/* The product of each matrix of x with that of the expert that was chosen for it; or of each row of x, [..., k], of several
 * experts; and what follows.
 *
 * Inputs: x, the numbers of the experts; then the weights, scales, biases of groups, and bias of one product, or of two that
 * are gated; then the weights of a token's experts, and what is added to their sum. */
struct ExpertProduct {
  static constexpr const char *name = "FastGatherQmm";
  Packing packing;
  bool of_rows = false, biased = false;
  enum { EACH, WEIGHTED, SUMMED, ADDED } form = EACH;
  bool gated = false;
  Gate gate{};
  bool operator==(const ExpertProduct &) const = default;

  size_t parts() const { return (packing.mode == AFFINE ? 3 : 2) + biased; }
  static array expanded(const array &x, mx::StreamOrDevice s) { return mx::expand_dims(x, std::vector<int>{-2, -3}, s); }
  array original(const Arrays &in, mx::StreamOrDevice s) const {
    auto multiply = [&](size_t at) {
      array y = own_gather_qmm(of_rows ? expanded(in[0], s) : in[0], in[at], in[at + 1], maybe(in, at + 2, packing.mode == AFFINE), std::nullopt, in[1], true, packing.group, packing.bits,
                               packing.mode_name(), std::nullopt, false, s);
      return biased ? own_add(y, mx::expand_dims(mx::take(in[at + parts() - 1], in[1], 0, s), -2, s), s) : y;
    };
    array y = gated ? gate.original(multiply(2), multiply(2 + parts()), s) : multiply(2);
    if (form == EACH) return y;
    y = own_multiply(mx::squeeze(y, -2, s), mx::expand_dims(in[weights_at()], -1, s), s);
    if (form == WEIGHTED) return y;
    y = own_sum(y, {-2}, false, s);
    return form == ADDED ? own_add(y, in.back(), s) : y;
  }
  size_t weights_at() const { return 2 + parts() * (gated ? 2 : 1); }
  int rows_each(const Arrays &in) const { return of_rows ? 1 : in[0].shape(-2); }
  mx::Shape shape(const Arrays &in) const {
    auto shape = in[1].shape();
    if (form == EACH) shape.push_back(rows_each(in));
    if (form >= SUMMED) shape.pop_back();
    shape.push_back(in[2].shape(-2));
    return shape;
  }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array x = with_rows(in[0], encoder), chosen = whole(in[1], encoder);
    if (of_rows) {
      auto shape = x.shape();
      auto strides = x.strides();
      shape.insert(shape.end() - 1, 2, 1), strides.insert(strides.end() - 1, 2, 0);
      array view(shape, x.dtype(), nullptr, {});
      view.copy_shared_buffer(x, strides, x.flags(), x.data_size());
      x = view;
    }
    const Rows rows(x, chosen.shape());
    const size_t n = in[2].shape(-2);
    auto room = [&] { return temporary({(int)rows.count, (int)n}, mx::float32, encoder); };
    struct Weights {
      Product product;
      size_t expert_bytes, scale_bytes, bias_bytes;

      Product of(uint32_t expert) const {
        Product mine = product;
        mine.w += expert * expert_bytes;
        mine.scales = (const char *)product.scales + expert * scale_bytes;
        if (mine.biases) mine.biases = (const char *)product.biases + expert * bias_bytes;
        if (mine.bias) mine.bias += expert * product.n;
        return mine;
      }
    };
    auto weights = [&](size_t at, array &to) {
      array w = with_matrices(in[at], encoder), scales = with_matrices(in[at + 1], encoder);
      Maybe biases = packing.mode == AFFINE ? Maybe(with_matrices(in[at + 2], encoder)) : std::nullopt;
      Product p = packing.product(w, scales, biases ? biases->data<void>() : nullptr, x.shape(-1), to);
      if (biased) p.bias = whole(in[at + parts() - 1], encoder).data<float>();
      return Weights{p, (size_t)*matrix_stride(w) * 4, *matrix_stride(scales) * scales.itemsize(), biases ? *matrix_stride(*biases) * biases->itemsize() : 0};
    };
    array to = form == EACH ? out : room();
    const Weights first = weights(2, to);
    std::optional<Weights> second;
    if (gated) {
      array factors = room();
      second = weights(2 + parts(), factors);
    }
    const float *shares_of = form == EACH ? nullptr : whole(in[weights_at()], encoder).data<float>();
    const float *added = form == ADDED ? whole(in.back(), encoder).data<float>() : nullptr;
    const size_t k = first.product.k, together = form == WEIGHTED ? 1 : chosen.shape(-1);
    float *floats = room_for(rows.count, k, encoder);
    encoder.dispatch([=, gate = gate, type = type_of(x.dtype()), experts = matrices_of(in[2]), chosen = chosen.data<uint32_t>(), each_rows = (uint32_t)rows_each(in),
                      to = to.data<float>(), out = out.data<float>()] {
      std::vector<uint32_t> order(rows.count);
      auto expert = [&](uint32_t row) { return std::min(chosen[row / each_rows], experts - 1); };
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return expert(a) < expert(b); });
      struct Job {
        Product product, second;
        int part;
      };
      std::vector<Job> jobs;
      for (size_t at = 0, end; at < rows.count; at = end) {
        const uint32_t of = expert(order[at]);
        for (end = at + 1; end < rows.count && expert(order[end]) == of;) end++;
        auto mine = [&](const Weights &weights) {
          Product p = weights.of(of);
          p.m = end - at;
          p.x = floats + at * k;
          p.order = order.data() + at;
          return p;
        };
        const Product p = mine(first), other = second ? mine(*second) : Product{};
        for (int part = 0; part < parts_of(p); part++) jobs.push_back({p, other, part});
      }
      each((int)rows.count, shares(rows.count, rows.count * k), [&](int i) { kernels->take(first.product, rows[order[i]], type, floats + i * k); });
      each((int)jobs.size(), shares(rows.count, rows.count * n * k), [&](int i) { compute_gated(jobs[i].product, jobs[i].second, gate, jobs[i].part); });
      if (!shares_of) return;
      each_row(rows.count / together, 32, rows.count * n, [&](size_t row) {
        kernels->mix(to + row * together * n, shares_of + row * together, together, added ? added + row * n : nullptr, out + row * n, n);
      });
    });
  }
};

}  // namespace
