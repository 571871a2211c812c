/* What the kernels compute, for any instruction set: plain structures and a table of functions.
 *
 * `simd.h` is compiled once per instruction set and fills a table; `mlx.cpp` chooses one table and calls it. Sizes and
 * strides are counted in elements, unless a name says bytes. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum Type { F32, F16, BF16, BOOL };
enum Mode { AFFINE, MXFP4, MXFP8, NVFP4 };
enum What { SIGMOID, TANH, EXP, EXPM1, ERF, SOFTPLUS, ADD, SUBTRACT, MULTIPLY, DIVIDE, LARGER, SMALLER };
enum Rule { DECAY, DELTA, WKV, SELECTIVE, LINEAR };
enum {
  KEYS = 64,    /* of a tile of attention */
  TILE = 72,    /* the most keys of one that is shared by queries which begin with different keys */
  QUERIES = 96, /* the most of a call */
  SCANNED = 32, /* rows of a state, the most of a call: with 128 columns, half the first-level cache */
  FEW = 4,      /* rows whose weights are unpacked in registers */
  FEWEST_TAPS = 2, /* of a convolution */
  MOST_TAPS = 8,
  MOST_STEPS = 12,
  CONSTANT = -1,
};

/* A function of one number: each step makes a number from one or two of those before it, or from a constant. */
struct Step {
  int what, first, second; /* 0: the number itself; i: what step i - 1 made; CONSTANT */
  float constant;
  bool operator==(const Step &other) const { return !__builtin_memcmp(this, &other, sizeof other); } /* 0 and -0 differ */
};
struct Formula {
  int count;
  Step steps[MOST_STEPS];
  bool operator==(const Formula &) const = default;
};

/* out[order[r]][n] = sum over k of x[r][k] * weight[n][k] + added[order[r]][n], for m rows and n outputs. */
struct Product {
  const float *x;       /* m rows, each of them in the room of k numbers, as `take` lays it out */
  size_t ldx;           /* from a row to the next */
  size_t m, n, k;
  int bits, group, mode;
  const uint8_t *w;     /* n rows of k * bits / 8 bytes */
  const void *scales, *biases;
  int scale_type;       /* of affine scales and biases; the others are bytes */
  void *out;            /* rows of n numbers */
  int out_type;
  const uint32_t *order; /* NULL: rows of the result stand in the order of x */
  const float *added;    /* as the result, if that is float32; NULL: nothing */
  const float *bias;     /* of each output; NULL: none */
  size_t ahead;          /* from outputs that are computed to those whose weights are fetched meanwhile */
};

/* softmax(scale * q @ k.T + mask) @ v, for `heads` heads of queries to each head of keys. Strides: batch, head, row.
 *
 * The keys lie in a ring: `oldest` is the one to begin with if there is no mask, which tells it otherwise. */
struct Attention {
  const void *q, *k, *v, *mask, *sinks;
  void *out;
  int heads, kv_heads, queries, keys, d, dv, type, mask_type, causal, oldest;
  float scale;
  int64_t qs[3], ks[3], vs[3], ms[4]; /* of the mask: the stride from a key to the next, too */
};

/* Numbers of tokens: the strides from a text to the next, from a token, and from a head, which `heads_each` heads of a
 * state share. */
struct Floats {
  const float *p;
  int64_t batch, token, head;
  int heads_each;
};

/* A scan by one of the rules of `runner/model/scans/kernel.py`, with the inputs there.
 *
 * States are [batch, heads, rows, columns]; vectors along the columns have zeros up to a multiple of the width of
 * vectors. Tokens of text b that count: the first counts[b] of tokens[b][length]. */
struct Scan {
  int rule, channels; /* the decay has a factor for each column */
  int heads, rows, columns, length, type;
  Floats in[6];
  const int *tokens, *counts;
  const float *before;
  float *after; /* may be `before` */
  char *y;      /* [batch, length, heads, rows] */
  size_t batch_bytes, token_bytes;
};

/* The decays of a recurrence: exp(-rate * step), where step = softplus(x + bias) within limits; or, with a bound,
 * exp(bound * sigmoid(rate * (x + bias))). `bias` and `rates` have room for whole vectors. */
struct Gates {
  size_t n;
  const float *bias, *rates;
  float least, most, bound; /* no bound: 0 */
};

/* out[r][i] = sum over t of x[r + t * dilation][i] * weight[i][t] + bias[i]: each channel by itself. */
struct Convolution {
  int taps, dilation, silu; /* silu: of the sums */
  size_t n;                 /* channels, at least WIDTH */
  const float *weight;      /* n rows of `taps` */
  const float *bias;        /* NULL: none */
};

struct Kernels {
  int width; /* of a vector, in float32 numbers */
  void (*take)(const Product &, const void *row, int type, float *out);
  void (*product)(const Product &, size_t from, size_t to, float *scratch);
  void (*unpack)(const Product &, size_t row, float *out);
  void (*weigh)(const Product &, float *scratch); /* out[r][k] = sum over n of x[r][n] * weight[n][k] */
  void (*attend)(const Attention &, int batch, int kv_head, int from, int to, float *scratch);
  void (*rms_norm)(const void *x, int type, size_t n, const void *weight, int weight_type, float eps, float scale, const float *added, void *out, int out_type);
  void (*layer_norm)(const float *x, size_t n, const float *weight, const float *bias, float eps, float *out);
  void (*rope)(const void *x, int type, int d, int dims, int traditional, const float *cosines, const float *sines, void *out);
  void (*apply)(const Formula &, const float *x, const float *factor, float *out, size_t n);
  void (*scan)(const Scan &, int batch, int head, int from, int to, float *scratch);
  void (*gates)(const Gates &, const float *x, float *decays, float *steps);
  void (*softmax)(const float *x, float *out, size_t n);
  void (*mix)(const float *rows, const float *weights, size_t count, const float *added, float *out, size_t n);
  void (*convolve)(const Convolution &, const float *const *x, size_t rows, float *out);
  void (*to_float)(const void *x, int type, size_t n, float *out);
  void (*from_float)(const float *x, size_t n, void *out, int type);
};

extern const Kernels kernels_avx2, kernels_avx512, kernels_neon; /* each where the processor is of that family */
