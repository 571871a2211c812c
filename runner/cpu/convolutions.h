/* Convolutions of each channel by itself along rows of channels, as recurrent layers have them: with bias and silu. */
#pragma once
#include "operation.h"

namespace {

enum : size_t { CONVOLVED_AT_ONCE = 16 }; /* rows, which share the weights that a vector of channels has in registers */

struct Convolved {
  static constexpr const char *name = "FastConvolution";
  int dilation;
  bool biased = false, silu = false;
  bool operator==(const Convolved &) const = default;

  static bool fits(const array &x, const array &weight, int dilation, int groups) {
    return x.dtype() == mx::float32 && weight.dtype() == mx::float32 && x.ndim() == 3 && weight.ndim() == 3 && groups == x.shape(2) && groups == weight.shape(0) &&
           groups >= 16 && weight.shape(2) == 1 && weight.shape(1) >= FEWEST_TAPS && weight.shape(1) <= MOST_TAPS && dilation > 0 && x.shape(1) > (weight.shape(1) - 1) * dilation;
  }
  array original(const Arrays &in, mx::StreamOrDevice s) const {
    array y = own_conv1d(in[0], in[1], 1, 0, dilation, in[0].shape(2), s);
    if (biased) y = own_add(y, in[2], s);
    return silu ? own_multiply(y, own_sigmoid(y, s), s) : y;
  }
  mx::Shape shape(const Arrays &in) const { return {in[0].shape(0), in[0].shape(1) - (in[1].shape(1) - 1) * dilation, in[0].shape(2)}; }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    array x = with_rows(in[0], encoder), weight = whole(in[1], encoder);
    const float *bias = biased ? whole(in[2], encoder).data<float>() : nullptr;
    const Convolution all{weight.shape(1), dilation, silu, (size_t)x.shape(2), weight.data<float>(), bias};
    encoder.dispatch([all, rows = Rows(x), batch = out.shape(0), length = (size_t)x.shape(1), made = (size_t)out.shape(1), out = out.data<float>()] {
      std::vector<const float *> places(rows.count);
      for (size_t row = 0; row < rows.count; row++) places[row] = (const float *)rows[row];
      const size_t parts = (made + CONVOLVED_AT_ONCE - 1) / CONVOLVED_AT_ONCE;
      each((int)(batch * parts), shares(batch * made, batch * made * all.n * (all.taps + 8)), [&](int i) {
        const size_t row = i / parts, from = i % parts * CONVOLVED_AT_ONCE;
        kernels->convolve(all, &places[row * length + from], std::min<size_t>(made - from, CONVOLVED_AT_ONCE), out + (row * made + from) * all.n);
      });
    });
  }
};

}  // namespace
