/* Convolutions of each channel by itself along rows of channels, as recurrent layers have them: with bias and silu. */
#pragma once
#include "operation.h"

namespace {

enum : size_t { CONVOLVED_AT_ONCE = 16 }; /* rows, which share the weights that a vector of channels has in registers */

struct Convolved {
  static constexpr const char *name = "FastConvolution";
  int dilation;
  size_t parts = 1; /* of the rows, the first inputs: a state and what follows it */
  bool biased = false, silu = false;
  bool operator==(const Convolved &) const = default;

  static bool fits(const array &x, const array &weight, int dilation, int groups) {
    return x.dtype() == mx::float32 && weight.dtype() == mx::float32 && x.ndim() == 3 && weight.ndim() == 3 && groups == x.shape(2) && groups == weight.shape(0) &&
           groups >= 16 && weight.shape(2) == 1 && weight.shape(1) >= FEWEST_TAPS && weight.shape(1) <= MOST_TAPS && dilation > 0 && x.shape(1) > (weight.shape(1) - 1) * (int64_t)dilation;
  }
  array original(const Arrays &in, mx::StreamOrDevice s) const {
    array y = own_conv1d(own_concatenate({in.begin(), in.begin() + parts}, 1, s), in[parts], 1, 0, dilation, in[0].shape(2), s);
    if (biased) y = own_add(y, in[parts + 1], s);
    return silu ? own_multiply(y, own_sigmoid(y, s), s) : y;
  }
  mx::Shape shape(const Arrays &in) const {
    int rows = (1 - in[parts].shape(1)) * dilation;
    for (size_t i = 0; i < parts; i++) rows += in[i].shape(1);
    return {in[0].shape(0), rows, in[0].shape(2)};
  }
  void run(const Arrays &in, array &out, mx::cpu::CommandEncoder &encoder) const {
    std::vector<Rows> read;
    for (size_t i = 0; i < parts; i++) read.emplace_back(with_rows(in[i], encoder));
    array weight = whole(in[parts], encoder);
    const float *bias = biased ? whole(in[parts + 1], encoder).data<float>() : nullptr;
    const Convolution all{weight.shape(1), dilation, silu, (size_t)out.shape(2), weight.data<float>(), bias};
    encoder.dispatch([all, read = std::move(read), batch = (size_t)out.shape(0), made = (size_t)out.shape(1), out = out.data<float>()] {
      std::vector<const float *> places;
      for (size_t row = 0; row < batch; row++)
        for (const Rows &part : read)
          for (size_t i = part.count / batch * row; i < part.count / batch * (row + 1); i++) places.push_back((const float *)part[i]);
      const size_t parts = (made + CONVOLVED_AT_ONCE - 1) / CONVOLVED_AT_ONCE, length = places.size() / batch;
      each((int)(batch * parts), shares(batch * made, batch * made * all.n * (all.taps + 8)), [&](int i) {
        const size_t row = i / parts, from = i % parts * CONVOLVED_AT_ONCE;
        kernels->convolve(all, &places[row * length + from], std::min<size_t>(made - from, CONVOLVED_AT_ONCE), out + (row * made + from) * all.n);
      });
    });
  }
};

}  // namespace
