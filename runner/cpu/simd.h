/* The kernels, for one instruction set: WIDTH is the number of float32 numbers in its vectors, TABLE the table's name.
 *
 * Included after `#pragma GCC target`, so no header of the C++ library may stand here: the linker would merge inline
 * functions compiled for AVX-512 with those of other files. Vectors are those of the compiler, so that one source serves
 * every width. Sums are made in one order for any number of rows: a row's result does not depend on the rows beside it,
 * on the number of threads, on where a prompt is cut, or on where its keys lie. */
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 32")

namespace {

typedef float V __attribute__((vector_size(4 * WIDTH)));
typedef int32_t I __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t U __attribute__((vector_size(4 * WIDTH)));
typedef float Quarter __attribute__((vector_size(16), may_alias));
typedef V Loose __attribute__((aligned(4), may_alias));
typedef Quarter LooseQuarter __attribute__((aligned(4), may_alias));
typedef uint32_t Word __attribute__((aligned(1), may_alias));

INLINE V load(const float *p) { return *(const Loose *)p; }
INLINE void store(float *p, V v) { *(Loose *)p = v; }
INLINE V all(float x) { return x - V{}; }
INLINE I all(int32_t x) { return x - I{}; }
INLINE V larger(V a, V b) { return a > b ? a : b; }
INLINE size_t least(size_t a, size_t b) { return a < b ? a : b; }
INLINE size_t up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/* Adds the elements of four vectors: neighbours, then pairs, then quarters. */
INLINE Quarter totals(V a, V b, V c, V d) {
  I even, odd; /* of two vectors, in each quarter: the first two places from one, the others from the other */
  UNROLLED for (int i = 0; i < WIDTH; i++) {
    even[i] = i / 4 * 4 + i % 2 * 2 + i % 4 / 2 * WIDTH;
    odd[i] = even[i] + 1;
  }
  V ab = __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
  V cd = __builtin_shuffle(c, d, even) + __builtin_shuffle(c, d, odd);
  V all_four = __builtin_shuffle(ab, cd, even) + __builtin_shuffle(ab, cd, odd);
  const Quarter *p = (const Quarter *)&all_four;
#if WIDTH == 16
  return (p[0] + p[2]) + (p[1] + p[3]);
#elif WIDTH == 8
  return p[0] + p[1];
#else
  return p[0];
#endif
}
INLINE float total(V v) { return totals(v, v, v, v)[0]; }
INLINE float largest(V v) {
  float most = v[0];
  UNROLLED for (int i = 1; i < WIDTH; i++) most = v[i] > most ? v[i] : most;
  return most;
}

/* exp(x) - 1 - x for numbers near 0 (Cephes). */
INLINE V near_zero(V x) {
  V p = all(1.9875691500e-4f);
  p = p * x + 1.3981999507e-3f;
  p = p * x + 8.3334519073e-3f;
  p = p * x + 4.1665795894e-2f;
  p = p * x + 1.6666665459e-1f;
  p = p * x + 5.0000001201e-1f;
  return p * (x * x);
}

/* exp(x): 2^n times a polynomial of the rest, 1 for 0 exactly; 0 below the smallest normal number, as for masked
 * scores. Two ulp. */
INLINE V exponential(V x) {
  const float lowest = -87.33654f, highest = 88.72283f, magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds */
  V y = x < lowest ? all(lowest) : x > highest ? all(highest) : x; /* NaN stays */
  V n = y * 1.44269504088896341f + magic - magic;
  n = n > 127.0f ? all(127.0f) : n; /* the rest grows to 1.04 at most */
  y = y - n * 0.693359375f;
  y = y + n * 2.12194440e-4f;
  V p = near_zero(y) + (y + 1.0f);
  V result = p * (V)((__builtin_convertvector(n, I) + 127) << 23);
  result = x > highest ? all(__builtin_inff()) : result;
  return x < lowest ? V{} : result;
}

/* --- Types */

INLINE I widened(const uint8_t *p) {
#if WIDTH == 8 && defined(__AVX2__)
  return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#elif WIDTH == 16 && defined(__AVX512F__)
  return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#else
  I v;
  UNROLLED for (int i = 0; i < WIDTH; i++) v[i] = p[i];
  return v;
#endif
}
INLINE I widened(const uint16_t *p) {
#if WIDTH == 8 && defined(__AVX2__)
  return (I)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
#elif WIDTH == 16 && defined(__AVX512F__)
  return (I)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#else
  I v;
  UNROLLED for (int i = 0; i < WIDTH; i++) v[i] = p[i];
  return v;
#endif
}

/* WIDTH numbers of a 16-bit type. */
INLINE V load_half(const uint16_t *p, int type) {
#if WIDTH == 8 && defined(__F16C__)
  if (type == F16) return (V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif WIDTH == 16 && defined(__AVX512F__)
  if (type == F16) return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#endif
  I bits = widened(p);
  if (type == BF16) return (V)(bits << 16);
  I sign = (bits & 0x8000) << 16, rest = (bits & 0x7fff) << 13;
  V value = (V)rest * 0x1p112f;
  I special = (I)(rest >= (0x7c00 << 13)); /* infinite, or no number */
  return (V)(sign | (special & (rest | 0x7f800000)) | (~special & (I)value));
}

INLINE size_t size_of(int type) { return type == F32 ? 4 : type == BOOL ? 1 : 2; }

/* WIDTH numbers from place i on. */
INLINE V load_as(const void *p, int type, size_t i) {
  return type == F32 ? load((const float *)p + i) : load_half((const uint16_t *)p + i, type);
}

INLINE float get(const void *p, int type, size_t i) {
  if (type == F32) return ((const float *)p)[i];
  uint16_t padded[WIDTH] = {((const uint16_t *)p)[i]};
  return load_half(padded, type)[0];
}

INLINE uint16_t half_of(float x, int type) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (type == BF16) {
    if (rest > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* rounds to more than 65504 */
  if (rest < 0x38800000) {                                  /* below 2^-14: in steps of 2^-24 */
    float magnitude, steps = 0.5f;
    memcpy(&magnitude, &rest, 4);
    steps += magnitude; /* rounds to steps of 2^-24 */
    uint32_t low;
    memcpy(&low, &steps, 4);
    return (uint16_t)(sign | (low - 0x3f000000));
  }
  return (uint16_t)(sign | ((rest + 0xfff + (rest >> 13 & 1) - (112u << 23)) >> 13));
}

INLINE void put(void *p, int type, size_t i, float x) {
  if (type == F32)
    ((float *)p)[i] = x;
  else
    ((uint16_t *)p)[i] = half_of(x, type);
}

void to_float(const void *x, int type, size_t n, float *out) {
  if (type == F32) {
    memcpy(out, x, 4 * n);
    return;
  }
  const uint16_t *halves = (const uint16_t *)x;
  for (size_t i = 0; i + WIDTH <= n; i += WIDTH) store(out + i, load_half(halves + i, type));
  if (n >= WIDTH) store(out + n - WIDTH, load_half(halves + n - WIDTH, type)); /* some of them once more */
  else for (size_t i = 0; i < n; i++) out[i] = get(x, type, i);
}

void from_float(const float *x, size_t n, void *out, int type) {
  if (type == F32)
    memcpy(out, x, 4 * n);
  else
    for (size_t i = 0; i < n; i++) put(out, type, i, x[i]);
}

/* --- Packed weights */

INLINE float of_e8m0(uint8_t code) {
  uint32_t bits = code ? (uint32_t)code << 23 : 0x400000u;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
INLINE V of_e4m3(I code) { return (V)(((code & 0x80) << 24) | ((code & 0x7f) << 20)) * 0x1p120f; }

const float FP4[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

INLINE V of_fp4(I code) {
#if WIDTH == 16
  return __builtin_shuffle(load(FP4), code);
#elif WIDTH == 8
  return (V)((I)__builtin_shuffle(load(FP4), code & 7) | (code & 8) << 28);
#else
  V v;
  UNROLLED for (int i = 0; i < WIDTH; i++) v[i] = FP4[code[i]];
  return v;
#endif
}

/* The weights of one group of one output: exactly those of mx.dequantize in float32. Reads nothing beyond the group.
 *
 * Where 4 bits are PAIRED, two steps take the low and the high halves of the same bytes: the even and the odd weights. */
template <int BITS, int GROUP, int MODE> struct Group {
  static constexpr int BYTES = BITS * GROUP / 8, STEPS = GROUP / WIDTH;
  static constexpr bool PAIRED = BITS == 4 && GROUP % (2 * WIDTH) == 0;
  const uint8_t *p;
  V scale, bias;

  INLINE void start(Group &g, const uint8_t *at, float scale, const float *bias) {
    g.p = at;
    g.scale = all(scale);
    if constexpr (MODE == AFFINE) g.bias = all(*bias);
  }

  /* The codes of WIDTH weights: a word holds 8 of at most 4 bits, or 4. */
  INLINE I codes(const uint8_t *p, int step) {
    if constexpr (BITS == 8) {
      return widened(p + step * WIDTH);
    } else if constexpr (PAIRED) {
      const I bytes = widened(p + step / 2 * WIDTH);
      return step % 2 ? bytes >> 4 : bytes & 15;
    } else {
      constexpr int HELD = BITS <= 4 && WIDTH >= 8 ? 8 : 4;
      I words, lane, shifts;
      UNROLLED for (int i = 0; i < WIDTH; i++) lane[i] = i;
      UNROLLED for (int i = 0; i < WIDTH; i += HELD) {
        const int bit = (step * WIDTH + i) * BITS, byte = bit / 8 < BYTES - 4 ? bit / 8 : BYTES - 4;
        const I word = all((int32_t) * (const Word *)(p + byte)), places = (lane - i) * BITS + (bit - 8 * byte);
        words = i ? (lane < i ? words : word) : word;
        shifts = i ? (lane < i ? shifts : places) : places;
      }
      return (I)((U)words >> (U)shifts) & ((1 << BITS) - 1);
    }
  }

  INLINE V weights(const Group &g, int step) {
    I code = codes(g.p, step);
    if constexpr (MODE == AFFINE) return __builtin_convertvector(code, V) * g.scale + g.bias;
    else return (MODE == MXFP8 ? of_e4m3(code) : of_fp4(code)) * g.scale;
  }
};

enum {
  REGISTERS = WIDTH == 8 ? 16 : 32, /* that hold vectors */
  CHUNK = 64,   /* groups whose scales are converted at a time */
  AHEAD = 16,   /* outputs fetched ahead */
  MANY = 16,    /* up to so many rows, unpacked weights stay in registers or the first-level cache, beyond it in the second */
  IN_L1 = 4096, /* unpacked weights */
};

/* `count` scales, or biases, from place `at` on: in place, or converted into `room`. */
template <int MODE> INLINE const float *scales_of(const void *p, int type, size_t at, int count, float *room) {
  if constexpr (MODE == AFFINE) {
    if (type == F32) return (const float *)p + at;
    to_float((const uint16_t *)p + at, type, (size_t)count, room);
  } else {
    const uint8_t *codes = (const uint8_t *)p + at;
    for (int i = 0; i < count; i++) room[i] = MODE == NVFP4 ? of_e4m3(all(codes[i]))[0] : of_e8m0(codes[i]);
  }
  return room;
}

/* Stores `count` sums from place `at` of the result on. */
__attribute__((noinline)) void put_sums(const Product &a, size_t at, const float *sums, size_t count) {
  for (size_t i = 0; i < count; i++) {
    const float sum = a.bias ? sums[i] + a.bias[(at + i) % a.n] : sums[i];
    put(a.out, a.out_type, at + i, a.added ? sum + a.added[at + i] : sum);
  }
}

/* Stores the sums of R rows from `row` on and O outputs, 1, 2 or 4, from `n` on. */
template <int R, int O> INLINE void finish(const Product &a, V (&sums)[O][R], size_t row, size_t n) {
  UNROLLED for (int r = 0; r < R; r++) {
    const size_t at = (a.order ? a.order[row + r] : row + r) * a.n + n;
    Quarter four = totals(sums[0][r], sums[1 % O][r], sums[2 % O][r], sums[3 % O][r]);
    if (O < 4 || a.out_type != F32) put_sums(a, at, (const float *)&four, O);
    else {
      if (a.bias) four += *(const LooseQuarter *)(a.bias + n);
      *(LooseQuarter *)((float *)a.out + at) = a.added ? four + *(const LooseQuarter *)(a.added + at) : four;
    }
  }
}

/* R rows from `row` on and O outputs from `n` on, unpacked in registers. */
template <int BITS, int GROUP, int MODE, int R, int O> INLINE void few(const Product &a, size_t row, size_t n) {
  typedef Group<BITS, GROUP, MODE> G;
  V sums[O][R];
  UNROLLED for (int o = 0; o < O; o++) UNROLLED for (int r = 0; r < R; r++) sums[o][r] = V{};
  float room[2][O][CHUNK];
  const size_t groups = a.k / GROUP, stride = groups * G::BYTES;
  const uint8_t *w = a.w + n * stride;
  const float *x = a.x + row * a.ldx;
  for (size_t first = 0; first < groups; first += CHUNK) {
    const int count = (int)least(groups - first, CHUNK);
    const float *scales = (const float *)a.scales + n * groups + first, *biases = (const float *)a.biases + n * groups + first;
    size_t apart = groups; /* from the scales of an output to those of the next */
    if (MODE != AFFINE || a.scale_type != F32) {
      for (int o = 0; o < O; o++) {
        scales_of<MODE>(a.scales, a.scale_type, (n + o) * groups + first, count, room[0][o]);
        if (MODE == AFFINE) scales_of<MODE>(a.biases, a.scale_type, (n + o) * groups + first, count, room[1][o]);
      }
      scales = room[0][0], biases = room[1][0], apart = CHUNK;
    }
    for (int i = 0; i < count; i++, w += G::BYTES, x += GROUP) {
      const bool fetches = G::BYTES >= 64 || (first + i) % (64 / G::BYTES) == 0;
      if (MODE == AFFINE && a.scale_type == F32 && i % (16 / O) == 0) { /* a line of those of O outputs, which lie together */
        const size_t ahead = (n + AHEAD) * groups + (first + i) * O;
        __builtin_prefetch((const float *)a.scales + ahead);
        __builtin_prefetch((const float *)a.biases + ahead);
      }
      UNROLLED for (int o = 0; o < O; o++) { /* one after the other: the sums of all stay in registers */
        const uint8_t *at = w + o * stride;
        const float *y = x;
        /* or the compiler keeps numbers of x for the next output, and sums in memory */
        if (R > 2 && REGISTERS == 16) asm("" : "+r"(y));
        if (fetches) __builtin_prefetch(at + AHEAD * stride);
        G group;
        G::start(group, at, scales[o * apart + i], MODE == AFFINE ? biases + o * apart + i : NULL);
        UNROLLED for (int step = 0; step < G::STEPS; step++) {
          V weights = G::weights(group, step);
          UNROLLED for (int r = 0; r < R; r++) sums[o][r] += weights * load(y + r * a.ldx + step * WIDTH);
        }
      }
    }
  }
  finish<R, O>(a, sums, row, n);
}

/* Outputs `from` to `to` of R rows from `row` on. */
template <int BITS, int GROUP, int MODE, int R>
__attribute__((noinline)) void few_rows(const Product &a, size_t from, size_t to, size_t row = 0) {
  constexpr int O = R * 4 + 8 <= REGISTERS ? 4 : R * 2 + 8 <= REGISTERS ? 2 : 1;
  size_t n = from;
  for (; n + O <= to; n += O) few<BITS, GROUP, MODE, R, O>(a, row, n);
  if constexpr (O > 1) for (; n < to; n++) few<BITS, GROUP, MODE, R, 1>(a, row, n);
}

template <int BITS, int GROUP, int MODE> __attribute__((noinline)) void unpack_row(const Product &a, size_t row, float *out) {
  typedef Group<BITS, GROUP, MODE> G;
  float room[2][CHUNK];
  const size_t groups = a.k / GROUP;
  for (size_t first = 0; first < groups; first += CHUNK) {
    int count = (int)least(groups - first, CHUNK);
    const float *scales = scales_of<MODE>(a.scales, a.scale_type, row * groups + first, count, room[0]), *biases = NULL;
    if (MODE == AFFINE) biases = scales_of<MODE>(a.biases, a.scale_type, row * groups + first, count, room[1]);
    for (int i = 0; i < count; i++) {
      G group;
      size_t g = first + i;
      G::start(group, a.w + (row * groups + g) * G::BYTES, scales[i], MODE == AFFINE ? biases + i : NULL);
      UNROLLED for (int step = 0; step < G::STEPS; step++) store(out + g * GROUP + step * WIDTH, G::weights(group, step));
    }
  }
}

/* The sums of products of R rows of x with O rows of w, over k numbers, a multiple of WIDTH. */
template <int R, int O> INLINE void dots(const float *x, size_t ldx, const float *w, size_t ldw, size_t k, V (&sums)[O][R]) {
  UNROLLED for (int o = 0; o < O; o++) UNROLLED for (int r = 0; r < R; r++) sums[o][r] = V{};
  for (size_t at = 0; at < k; at += WIDTH) {
    V y[R];
    UNROLLED for (int r = 0; r < R; r++) y[r] = load(x + r * ldx + at);
    UNROLLED for (int o = 0; o < O; o++) {
      V weight = load(w + o * ldw + at);
      UNROLLED for (int r = 0; r < R; r++) sums[o][r] += weight * y[r];
    }
  }
}

enum { AT_ONCE = WIDTH == 8 ? 3 : 6 /* rows of the kernels for many rows, each with four outputs or keys */ };

/* Fetches the lines whose turn it is of `bytes` bytes for four outputs from `n` on. */
INLINE void fetch(const void *p, size_t n, size_t bytes, size_t turn, size_t turns) {
  for (size_t at = 64 * turn; at < bytes; at += 64 * turns) __builtin_prefetch((const char *)p + n * bytes / 4 + at, 0, 2);
}

/* R rows, the tile `turn` of `turns`, and `count` outputs, whose weights are unpacked in `w`. Unpacking is bound by
 * memory, which is idle meanwhile, so each tile fetches a part of the weights that come next. */
template <int R> __attribute__((noinline)) void dots_of(const Product &a, const float *w, size_t row, size_t n, size_t count, size_t turn, size_t turns) {
  const size_t bytes = 4 * a.k * a.bits / 8, scale_bytes = 4 * a.k / a.group * (a.mode == AFFINE ? size_of(a.scale_type) : 1);
  size_t i = 0;
  for (; i + 4 <= count; i += 4) {
    V sums[4][R];
    if (n + i + a.ahead < a.n) {
      fetch(a.w, n + i + a.ahead, bytes, turn, turns);
      fetch(a.scales, n + i + a.ahead, scale_bytes, turn, turns);
      if (a.mode == AFFINE) fetch(a.biases, n + i + a.ahead, scale_bytes, turn, turns);
    }
    dots<R, 4>(a.x + row * a.ldx, a.ldx, w + i * a.k, a.k, a.k, sums);
    finish<R, 4>(a, sums, row, n + i);
  }
  for (; i < count; i++) {
    V sums[1][R];
    dots<R, 1>(a.x + row * a.ldx, a.ldx, w + i * a.k, a.k, a.k, sums);
    finish<R, 1>(a, sums, row, n + i);
  }
}

template <int N> struct Count { static constexpr int COUNT = N; };

/* Calls f with a constant that is `count`, from LEAST to MOST. */
template <int MOST, int LEAST = 1, typename F> INLINE void with_count(size_t count, const F &f) {
  if (count == MOST) return f(Count<MOST>{});
  if constexpr (MOST > LEAST) with_count<MOST - 1, LEAST>(count, f);
}

/* Calls f with the first row of each tile, its number of rows, at most `most` and nearly alike, the tile's number, and
 * how many there are. */
template <typename F> INLINE void in_tiles(size_t rows, size_t most, const F &f) {
  const size_t tiles = (rows + most - 1) / most;
  for (size_t tile = 0, row = 0, count; tile < tiles; tile++, row += count) f(row, count = (rows - row + tiles - tile - 1) / (tiles - tile), tile, tiles);
}

/* Calls f with a first row and a constant, the number of rows, for all rows. */
template <typename F> INLINE void at_once(size_t rows, const F &f) {
  size_t row = 0;
  for (; row + AT_ONCE <= rows; row += AT_ONCE) f(row, Count<AT_ONCE>{});
  if (row < rows) with_count<AT_ONCE - 1>(rows - row, [&](auto some) { f(row, some); });
}

#ifdef INTEGERS
#include "integers.h"
#else
template <int BITS, int GROUP, int MODE> struct Integers { static constexpr bool SERVE = false; };
#endif

/* As `product_in_integers`, in float32. */
template <int BITS, int GROUP, int MODE> void product_in_floats(const Product &a, size_t from, size_t to, float *scratch) {
  if (a.m == 1) return few_rows<BITS, GROUP, MODE, 1>(a, from, to);
  if constexpr (BITS == 4 || BITS == 8) {
    /* With enough registers, unpacking once for each four rows costs less than to store the weights and to load them. */
    if (a.m <= (REGISTERS == 32 ? 2 * FEW : FEW)) {
      const size_t outputs = a.m <= FEW ? to - from : 4;
      for (size_t n = from; n < to; n += outputs)
        for (size_t row = 0; row < a.m; row += FEW)
          with_count<FEW>(least(a.m - row, FEW), [&](auto rows) { few_rows<BITS, GROUP, MODE, rows.COUNT>(a, n, least(n + outputs, to), row); });
      return;
    }
  }
  const size_t most = a.m > MANY ? to - from : IN_L1 / a.k < 4 ? 4 : IN_L1 / a.k / 4 * 4;
  for (size_t n = from; n < to; n += most) {
    const size_t count = least(most, to - n);
    for (size_t i = 0; i < count; i++) unpack_row<BITS, GROUP, MODE>(a, n + i, scratch + i * a.k);
    in_tiles(a.m, AT_ONCE, [&](size_t row, size_t rows, size_t tile, size_t tiles) {
      with_count<AT_ONCE>(rows, [&](auto rows) { dots_of<rows.COUNT>(a, scratch, row, n, count, tile, tiles); });
    });
  }
}

template <int BITS, int GROUP, int MODE> void product_of(const Product &a, size_t from, size_t to, float *scratch) {
  if constexpr (Integers<BITS, GROUP, MODE>::SERVE) product_in_integers<BITS, GROUP, MODE>(a, from, to, scratch);
  else product_in_floats<BITS, GROUP, MODE>(a, from, to, scratch);
}

#define FORMATS(OF) \
  if (a.mode == MXFP4) OF(4, 32, MXFP4) \
  if (a.mode == MXFP8) OF(8, 32, MXFP8) \
  if (a.mode == NVFP4) OF(4, 16, NVFP4) \
  switch (a.bits * 1000 + a.group) { \
    GROUPS(OF, 2) GROUPS(OF, 3) GROUPS(OF, 4) GROUPS(OF, 5) GROUPS(OF, 6) GROUPS(OF, 8) \
  }
#define GROUPS(OF, BITS) \
  case BITS * 1000 + 32: OF(BITS, 32, AFFINE) \
  case BITS * 1000 + 64: OF(BITS, 64, AFFINE) \
  case BITS * 1000 + 128: OF(BITS, 128, AFFINE)

void product(const Product &a, size_t from, size_t to, float *scratch) {
#define OF(...) return product_of<__VA_ARGS__>(a, from, to, scratch);
  FORMATS(OF)
#undef OF
}

template <int BITS, int GROUP, int MODE> void take_row(const Product &a, const void *row, int type, float *out) {
  if constexpr (Integers<BITS, GROUP, MODE>::SERVE) {
    take_integers<Integers<BITS, GROUP, MODE>::PAIRS>(row, type, a.k, a.group, out);
  } else if constexpr (Group<BITS, GROUP, MODE>::PAIRED) { /* the even and the odd numbers of each pair of vectors apart */
    I even;
    UNROLLED for (int i = 0; i < WIDTH; i++) even[i] = 2 * i;
    for (size_t at = 0; at < a.k; at += 2 * WIDTH) {
      const V first = load_as(row, type, at), second = load_as(row, type, at + WIDTH);
      store(out + at, __builtin_shuffle(first, second, even));
      store(out + at + WIDTH, __builtin_shuffle(first, second, even + 1));
    }
  } else {
    to_float(row, type, a.k, out);
  }
}

void take(const Product &a, const void *row, int type, float *out) {
#define OF(...) return take_row<__VA_ARGS__>(a, row, type, out);
  FORMATS(OF)
#undef OF
}

void unpack(const Product &a, size_t row, float *out) {
#define OF(...) \
  { \
    unpack_row<__VA_ARGS__>(a, row, out); \
    if (!Group<__VA_ARGS__>::PAIRED) return; \
    break; \
  }
  do {
    FORMATS(OF)
  } while (0);
#undef OF
  float even[WIDTH], odd[WIDTH];
  for (size_t at = 0; at < a.k; at += 2 * WIDTH) {
    memcpy(even, out + at, sizeof even);
    memcpy(odd, out + at + WIDTH, sizeof odd);
    UNROLLED for (int i = 0; i < WIDTH; i++) out[at + 2 * i] = even[i], out[at + 2 * i + 1] = odd[i];
  }
}

/* --- Attention */

/* The scores of R queries with `keys` keys. */
template <int R> INLINE void scores(const float *q, const float *k, size_t ldk, int keys, size_t d, float *out, size_t ldo) {
  int i = 0;
  for (; i + 4 <= keys; i += 4) {
    V sums[4][R];
    dots<R, 4>(q, d, k + i * ldk, ldk, d, sums);
    UNROLLED for (int r = 0; r < R; r++)
      *(LooseQuarter *)(out + r * ldo + i) = totals(sums[0][r], sums[1][r], sums[2][r], sums[3][r]);
  }
  for (; i < keys; i++) {
    V sums[1][R];
    dots<R, 1>(q, d, k + i * ldk, ldk, d, sums);
    UNROLLED for (int r = 0; r < R; r++) out[r * ldo + i] = total(sums[0][r]);
  }
}

/* out[r] = out[r] * factor[r] + sum over keys of weight[r][key] * v[key], in N vectors from `out` and `v` on. */
template <int R, int N> INLINE void weigh(const float *weights, size_t ldw, const float *v, size_t ldv, int keys, float *out, size_t ldo, const float *factor) {
  V sums[R][N];
  UNROLLED for (int r = 0; r < R; r++) UNROLLED for (int i = 0; i < N; i++) sums[r][i] = load(out + r * ldo + i * WIDTH) * factor[r];
  for (int key = 0; key < keys; key++) {
    V weight[R];
    UNROLLED for (int r = 0; r < R; r++) weight[r] = all(weights[r * ldw + key]);
    UNROLLED for (int i = 0; i < N; i++) {
      const V y = load(v + key * ldv + i * WIDTH);
      UNROLLED for (int r = 0; r < R; r++) sums[r][i] += y * weight[r];
    }
  }
  UNROLLED for (int r = 0; r < R; r++) UNROLLED for (int i = 0; i < N; i++) store(out + r * ldo + i * WIDTH, sums[r][i]);
}
template <int R> INLINE void weigh_all(const float *weights, size_t ldw, const float *v, size_t ldv, int keys, float *out, size_t dv, const float *factor) {
  size_t at = 0;
  for (; at + 4 * WIDTH <= dv; at += 4 * WIDTH) weigh<R, 4>(weights, ldw, v + at, ldv, keys, out + at, dv, factor);
  for (; at + 2 * WIDTH <= dv; at += 2 * WIDTH) weigh<R, 2>(weights, ldw, v + at, ldv, keys, out + at, dv, factor);
  for (; at < dv; at += WIDTH) weigh<R, 1>(weights, ldw, v + at, ldv, keys, out + at, dv, factor);
}

/* The score of a hidden key, as MLX has it: no weight beside any other. */
INLINE float hidden_score(int type) { return type == F16 ? -65504.0f : type == BF16 ? -3.38953139e38f : -3.402823466e38f; }

/* Adds the mask to the scores of one query, or hides keys. */
INLINE void mask_scores(const Attention &a, size_t at, int keys, float hidden, float *scores) {
  const int64_t step = a.ms[3];
  int i = 0;
  for (; step == 1 && i + WIDTH <= keys; i += WIDTH) {
    const V score = load(scores + i);
    if (a.mask_type == BOOL) store(scores + i, widened((const uint8_t *)a.mask + at + i) ? score : all(hidden));
    else if (a.mask_type == F32) store(scores + i, score + load((const float *)a.mask + at + i));
    else store(scores + i, score + load_half((const uint16_t *)a.mask + at + i, a.mask_type));
  }
  for (; i < keys; i++) {
    if (a.mask_type != BOOL) scores[i] += get(a.mask, a.mask_type, at + i * step);
    else if (!((const uint8_t *)a.mask)[at + i * step]) scores[i] = hidden;
  }
}

/* The keys that queries of a call see: the one in the ring that they begin with, and, counted from it, where those of each
 * query begin and those of all end. */
struct Seen {
  int base, end, starts[QUERIES];
};

/* The key at a place that may be beyond the end of the ring. */
INLINE int in_ring(const Attention &a, int place) { return place < a.keys ? place : place - a.keys; }

/* The first or the last key of [from, to) which a query sees, or does not; -1 if there is none. The query's mask begins at
 * `at`; it sees what any of its heads does. */
int find_key(const Attention &a, size_t at, int from, int to, bool seen, bool last) {
  const int heads = a.ms[1] ? a.heads : 1;
  if (a.mask_type == BOOL && a.ms[3] == 1 && heads == 1) {
    const uint8_t *mask = (const uint8_t *)a.mask + at + from;
    const void *found = last ? memrchr(mask, seen, (size_t)(to - from)) : memchr(mask, seen, (size_t)(to - from));
    return found ? from + (int)((const uint8_t *)found - mask) : -1;
  }
  for (int i = from; i < to; i++) {
    const int key = last ? from + to - 1 - i : i;
    bool sees = false;
    for (int head = 0; head < heads && !sees; head++) {
      const size_t place = at + head * a.ms[1] + key * a.ms[3];
      sees = a.mask_type == BOOL ? ((const uint8_t *)a.mask)[place] : !(get(a.mask, a.mask_type, place) <= hidden_score(a.mask_type));
    }
    if (sees == seen) return key;
  }
  return -1;
}

/* Where the first or the last key lies that a query sees, counted from `base`; -1 if there is none. */
int find_seen(const Attention &a, size_t at, int base, bool last) {
  const int behind = find_key(a, at, base, a.keys, true, last), before = find_key(a, at, 0, base, true, last);
  const bool is_before = before >= 0 && (last || behind < 0);
  return is_before ? before + a.keys - base : behind < 0 ? -1 : behind - base;
}

/* Finds the keys of the queries from `from` on, up to the first one that cannot share tiles with them, which it returns.
 *
 * Each query begins with the first key that it sees, so that its sums have one order wherever its keys lie: behind the
 * padding of a batch, in a ring, or behind those that only other queries see. */
int find_keys(const Attention &a, int batch, int kv_head, int from, int to, Seen &seen) {
  seen.base = a.oldest, seen.end = a.causal ? a.keys - a.queries + to : a.keys;
  for (int query = from; query < to; query++) {
    int &start = seen.starts[query - from] = 0;
    if (!a.mask) continue;
    const size_t at = batch * a.ms[0] + kv_head * a.heads * a.ms[1] + query * a.ms[2];
    if (query == from) {
      const int first = find_key(a, at, 0, a.keys, true, false);
      if (first < 0) return query + 1; /* it sees nothing: the mean of all values, as in MLX */
      const bool around = first == 0 && find_key(a, at, a.keys - 1, a.keys, true, true) > 0; /* over the end of the ring */
      seen.base = around ? find_key(a, at, 0, a.keys, false, true) + 1 : first;
      seen.end = 0;
    }
    start = find_seen(a, at, seen.base, false);
    if (start < 0 || start > TILE - KEYS) return query;
    const int end = find_seen(a, at, seen.base, true) + 1;
    seen.end = end > seen.end ? end : seen.end;
  }
  return to;
}

/* The rows of a tile as float32, `width` numbers apart, a multiple of WIDTH: in place if they are so already. */
INLINE const float *tile(const void *p, int type, int64_t stride, int rows, int d, size_t width, float *room, size_t *ld) {
  *ld = type == F32 && (size_t)d == width ? (size_t)stride : width;
  if (type == F32 && (size_t)d == width) return (const float *)p;
  for (int i = 0; i < rows; i++) {
    to_float((const char *)p + size_of(type) * i * stride, type, (size_t)d, room + i * width);
    memset(room + i * width + d, 0, 4 * (width - d));
  }
  return room;
}

/* Sums of packed rows, each times its weight: of values that a cache keeps packed. `scratch` holds a tile of them, of k
 * numbers each, and one of weights. */
void weigh_packed(const Product &a, float *scratch) {
  float *values = scratch, *weights = values + KEYS * a.k, *out = (float *)a.out;
  float factor[AT_ONCE];
  for (int r = 0; r < AT_ONCE; r++) factor[r] = 1;
  memset(out, 0, sizeof(float) * a.m * a.k);
  for (size_t first = 0; first < a.n; first += KEYS) {
    const int keys = (int)least(a.n - first, KEYS);
    for (int i = 0; i < keys; i++) unpack(a, first + i, values + i * a.k);
    for (size_t r = 0; r < a.m; r++) memcpy(weights + r * KEYS, a.x + r * a.ldx + first, sizeof(float) * keys);
    at_once(a.m, [&](size_t r, auto rows) { weigh_all<rows.COUNT>(weights + r * KEYS, KEYS, values, a.k, keys, out + r * a.k, a.k, factor); });
  }
}

/* Keys and values of a tile which lie together: it has two pieces if it reaches over the end of the ring. */
struct Piece {
  int keys;
  const float *k, *v;
  size_t ldk, ldv;
};

/* The queries `from` to `to` of all heads of one head of keys, tile by tile of KEYS keys, counted from each query's first. */
INLINE void attend_together(const Attention &a, int batch, int kv_head, int from, int to, const Seen &seen, float *scratch) {
  const int count = to - from, rows = a.heads * count;
  int more = 0; /* keys of a tile: between the queries' first ones */
  for (int i = 0; i < count; i++) more = seen.starts[i] > more ? seen.starts[i] : more;
  const size_t d = up(a.d, WIDTH), dv = up(a.dv, WIDTH), size = size_of(a.type), ld = KEYS + more;
  float *q = scratch, *sums = q + rows * d, *scored = sums + rows * dv, *k_room = scored + rows * ld;
  float *v_room = k_room + ld * d, *top = v_room + ld * dv, *weight = top + rows, *factor = weight + rows;
  for (int r = 0; r < rows; r++) { /* row r: head r / count, query r % count */
    const int head = kv_head * a.heads + r / count;
    const char *p = (const char *)a.q + size * (batch * a.qs[0] + head * a.qs[1] + (from + r % count) * a.qs[2]);
    float *row = q + r * d;
    to_float(p, a.type, a.d, row);
    memset(row + a.d, 0, 4 * (d - a.d));
    for (size_t i = 0; i < d; i += WIDTH) store(row + i, load(row + i) * a.scale);
    top[r] = a.sinks ? get(a.sinks, a.type, head) : -__builtin_inff();
    weight[r] = a.sinks ? 1 : 0;
  }
  memset(sums, 0, sizeof(float) * rows * dv);
  const float hidden = hidden_score(a.type);
  const char *k_ring = (const char *)a.k + size * (batch * a.ks[0] + kv_head * a.ks[1]), *v_ring = (const char *)a.v + size * (batch * a.vs[0] + kv_head * a.vs[1]);
  for (int first = 0; first < seen.end; first += KEYS) {
    const int keys = (int)least(seen.end - first, ld), at = in_ring(a, seen.base + first);
    Piece pieces[2];
    for (int i = 0, key = at, piece = 0; i < keys; i += pieces[piece++].keys, key = 0) {
      Piece &p = pieces[piece];
      p.keys = (int)least(keys - i, a.keys - key);
      p.k = tile(k_ring + size * key * a.ks[2], a.type, a.ks[2], p.keys, a.d, d, k_room + i * d, &p.ldk);
      p.v = tile(v_ring + size * key * a.vs[2], a.type, a.vs[2], p.keys, a.dv, dv, v_room + i * dv, &p.ldv);
      at_once(rows, [&](size_t r, auto some) { scores<some.COUNT>(q + r * d, p.k, p.ldk, p.keys, d, scored + r * ld + i, ld); });
    }
    for (int r = 0; r < rows; r++) {
      const int query = from + r % count, start = seen.starts[query - from], own = keys - start < KEYS ? keys - start : KEYS;
      float *row = scored + r * ld + start; /* the query's own keys; the others get no weight */
      if (more) {
        memset(row - start, 0, sizeof(float) * start);
        memset(row + KEYS, 0, sizeof(float) * (more - start));
      }
      if (a.causal) {
        for (int i = a.keys - a.queries + query + 1 - first; i < own; i++)
          if (i >= 0) row[i] = hidden;
      } else if (a.mask) {
        const int head = kv_head * a.heads + r / count, key = in_ring(a, at + start), whole = own < a.keys - key ? own : a.keys - key;
        const size_t place = batch * a.ms[0] + head * a.ms[1] + query * a.ms[2];
        mask_scores(a, place + key * a.ms[3], whole, hidden, row);
        if (whole < own) mask_scores(a, place, own - whole, hidden, row + whole);
      }
      for (int i = own > 0 ? own : 0; i < KEYS; i++) row[i] = -__builtin_inff();
      V most = load(row);
      for (int i = WIDTH; i < KEYS; i += WIDTH) most = larger(most, load(row + i));
      const float in_tile = largest(most), now = in_tile > top[r] ? in_tile : top[r];
      if (now == -__builtin_inff()) { /* an additive mask hides all keys so far */
        factor[r] = 1;
        memset(row, 0, sizeof(float) * KEYS);
        continue;
      }
      factor[r] = exponential(all(top[r] - now))[0];
      top[r] = now;
      V sum = V{};
      for (int i = 0; i < KEYS; i += WIDTH) {
        V e = exponential(load(row + i) - now);
        store(row + i, e);
        sum += e;
      }
      weight[r] = weight[r] * factor[r] + total(sum);
    }
    for (int i = 0, piece = 0; i < keys; i += pieces[piece++].keys) {
      const Piece &p = pieces[piece];
      for (int r = 0; piece && r < rows; r++) factor[r] = 1; /* its sums are of this tile already */
      at_once(rows, [&](size_t r, auto some) { weigh_all<some.COUNT>(scored + r * ld + i, ld, p.v, p.ldv, p.keys, sums + r * dv, dv, factor + r); });
    }
  }
  for (int r = 0; r < rows; r++) {
    const size_t head = (size_t)batch * a.kv_heads * a.heads + kv_head * a.heads + r / count;
    char *out = (char *)a.out + size * ((head * a.queries + from + r % count) * a.dv);
    for (size_t i = 0; i < dv; i += WIDTH) store(sums + r * dv + i, load(sums + r * dv + i) / weight[r]);
    from_float(sums + r * dv, a.dv, out, a.type);
  }
}

void attend(const Attention &a, int batch, int kv_head, int from, int to, float *scratch) {
  Seen seen;
  for (int next; from < to; from = next) {
    next = find_keys(a, batch, kv_head, from, to, seen);
    attend_together(a, batch, kv_head, from, next, seen, scratch);
  }
}

/* --- Rows of numbers */

/* As MLX: the mean in float32, and the product rounded to the type of the result before it is multiplied by the weight,
 * and all that by `scale`. Then `added` is, unless it is NULL: with a scale of 1, no sum is rounded otherwise than by itself. */
void rms_norm(const void *x, int type, size_t n, const void *weight, int weight_type, float eps, float scale, const float *added, void *out, int out_type) {
  V sums[4] = {};
  size_t i = 0;
  float room[4 * WIDTH];
  for (; i + 4 * WIDTH <= n; i += 4 * WIDTH) {
    const float *p = (const float *)x + i;
    if (type != F32) to_float((const uint16_t *)x + i, type, 4 * WIDTH, room), p = room;
    UNROLLED for (int j = 0; j < 4; j++) sums[j] += load(p + j * WIDTH) * load(p + j * WIDTH);
  }
  float sum = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < n; i++) sum += get(x, type, i) * get(x, type, i);
  const float factor = 1.0f / __builtin_sqrtf(sum / n + eps);
  i = 0;
  if (type == F32 && out_type == F32 && (weight_type == F32 || !weight))
    for (; i + WIDTH <= n; i += WIDTH) {
      V y = load((const float *)x + i) * factor;
      y = (weight ? y * load((const float *)weight + i) : y) * scale;
      store((float *)out + i, added ? y + load(added + i) : y);
    }
  for (; i < n; i++) {
    float y = get(x, type, i) * factor;
    if (out_type != F32) {
      uint16_t rounded = half_of(y, out_type);
      y = get(&rounded, out_type, 0);
    }
    y = (weight ? y * get(weight, weight_type, i) : y) * scale;
    put(out, out_type, i, added ? y + added[i] : y);
  }
}

/* x less its mean, over its deviation, times `weight` plus `bias` unless they are NULL. */
void layer_norm(const float *x, size_t n, const float *weight, const float *bias, float eps, float *out) {
  float mean = 0, variance = 0;
  for (int squares = 0; squares < 2; squares++) {
    V sums[4] = {};
    size_t i = 0;
    for (; i + 4 * WIDTH <= n; i += 4 * WIDTH)
      UNROLLED for (int j = 0; j < 4; j++) {
        const V y = load(x + i + j * WIDTH) - mean;
        sums[j] += squares ? y * y : y;
      }
    float sum = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < n; i++) sum += squares ? (x[i] - mean) * (x[i] - mean) : x[i];
    (squares ? variance : mean) = sum / n;
  }
  const float factor = 1.0f / __builtin_sqrtf(variance + eps);
  size_t i = 0;
  for (; i + WIDTH <= n; i += WIDTH) {
    V y = (load(x + i) - mean) * factor;
    if (weight) y *= load(weight + i);
    store(out + i, bias ? y + load(bias + i) : y);
  }
  for (; i < n; i++) {
    const float y = (x[i] - mean) * factor * (weight ? weight[i] : 1.0f);
    out[i] = bias ? y + bias[i] : y;
  }
}

/* Turns the first `dims` of d numbers by angles, in pairs: neighbours if `traditional`, else halves. */
void rope(const void *x, int type, int d, int dims, int traditional, const float *cosines, const float *sines, void *out) {
  const int half = dims / 2;
  int i = 0;
  if (type == F32 && !traditional)
    for (; i + WIDTH <= half; i += WIDTH) {
      V a = load((const float *)x + i), b = load((const float *)x + half + i), c = load(cosines + i), s = load(sines + i);
      store((float *)out + i, a * c - b * s);
      store((float *)out + half + i, a * s + b * c);
    }
  for (; i < half; i++) {
    const int first = traditional ? 2 * i : i, second = traditional ? 2 * i + 1 : half + i;
    const float a = get(x, type, first), b = get(x, type, second);
    put(out, type, first, a * cosines[i] - b * sines[i]);
    put(out, type, second, a * sines[i] + b * cosines[i]);
  }
  const size_t size = size_of(type);
  memcpy((char *)out + size * dims, (const char *)x + size * dims, size * (d - dims));
}

INLINE V sigmoid(V x) {
  V e = exponential(x < 0 ? x : -x); /* of -|x| */
  return (x < 0 ? e : all(1.0f)) / (1.0f + e);
}

/* log(1 + exp(x)) = max(x, 0) + log(1 + e), e of -|x|; and log(1 + e) = 2 atanh(e / (2 + e)), of at most 1/3. */
INLINE V softplus(V x) {
  V e = exponential(x < 0 ? x : -x), y = e / (2.0f + e), square = y * y, sum = all(1.0f / 15);
  UNROLLED for (int n = 13; n > 0; n -= 2) sum = sum * square + 1.0f / n;
  return larger(x, V{}) + 2.0f * y * sum;
}

INLINE V tangent(V x) {
  V doubled = sigmoid(2.0f * x); /* tanh(x) = 2 sigmoid(2 x) - 1, which loses digits near 0: x - x^3/3 + 2 x^5/15 there */
  V square = x * x, near = x * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15 - square * (17.0f / 315))));
  return square < 0.01f ? near : 2.0f * doubled - 1.0f;
}

/* The error function (by N. Juffa): a polynomial near 0, beyond it one of the logarithm of what is left to 1. One ulp. */
INLINE V error_function(V x) {
  const V size = x < 0 ? -x : x, square = x * x;
  V far = size * -1.72853470e-5f + 3.83197126e-4f, near = square * -5.96761703e-4f + 4.99119423e-3f;
  far = far * square + (size * -3.88396438e-3f + 2.42546219e-2f);
  far = far * size - 1.06777877e-1f;
  far = far * size - 6.34846687e-1f;
  far = far * size - 1.28717512e-1f;
  far = 1.0f - exponential(far * size - size);
  near = near * square - 2.67681349e-2f;
  near = near * square + 1.12819925e-1f;
  near = near * square - 3.76125336e-1f;
  near = near * square + 1.28379166e-1f;
  return size > 0.927734375f ? (x < 0 ? -far : far) : near * x + x; /* NaN stays */
}

enum { BLOCK = 64 /* numbers that take a step together, and stay in the first-level cache */ };

template <typename F> INLINE void take_step(const float *first, const float *second, const V &constant, float *out, const F &f) {
  for (int i = 0; i < BLOCK; i += WIDTH) store(out + i, f(first ? load(first + i) : constant, second ? load(second + i) : constant));
}

/* out = f(x), times `factor` unless it is NULL. */
void apply(const Formula &f, const float *x, const float *factor, float *out, size_t n) {
  float room[MOST_STEPS + 1][BLOCK], *made[MOST_STEPS + 1];
  const float *input;
  for (int i = 0; i <= f.count; i++) made[i] = room[i];
  for (size_t at = 0; at < n; at += BLOCK) {
    const size_t count = least(BLOCK, n - at);
    const bool whole = count == BLOCK; /* the last numbers take the same steps, in a block that is filled up */
    if (!whole) memset(room[0], 0, sizeof room[0]), memcpy(room[0], x + at, 4 * count);
    input = whole ? x + at : room[0];
    made[f.count] = whole && !factor ? out + at : room[f.count];
    for (int i = 0; i < f.count; i++) {
      const Step &step = f.steps[i];
      auto place = [&](int i) { return i == CONSTANT ? NULL : i ? made[i] : input; };
      const float *first = place(step.first), *second = place(step.second);
      const V constant = all(step.constant);
#define TAKE(WHAT, RESULT) \
  case WHAT: \
    take_step(first, second, constant, made[i + 1], [](V a, [[maybe_unused]] V b) { return RESULT; }); \
    break;
      switch (step.what) {
        TAKE(SIGMOID, sigmoid(a))
        TAKE(TANH, tangent(a))
        TAKE(EXP, exponential(a))
        TAKE(EXPM1, (a < 0 ? -a : a) < 0.34f ? near_zero(a) + a : exponential(a) - 1.0f)
        TAKE(ERF, error_function(a))
        TAKE(SOFTPLUS, softplus(a))
        TAKE(ADD, a + b)
        TAKE(SUBTRACT, a - b)
        TAKE(MULTIPLY, a * b)
        TAKE(DIVIDE, a / b)
        TAKE(LARGER, (a != a) | (a > b) ? a : b) /* NaN stays */
        TAKE(SMALLER, (a != a) | (a < b) ? a : b)
      }
#undef TAKE
    }
    if (factor) for (size_t i = 0; i < count; i++) out[at + i] = made[f.count][i] * factor[at + i];
    else if (!whole) memcpy(out + at, made[f.count], 4 * count);
  }
}

void softmax(const float *x, float *out, size_t n) {
  float top = -__builtin_inff(), rest[WIDTH] = {0};
  size_t i = 0;
  V most = all(top), sums = V{};
  for (; i + WIDTH <= n; i += WIDTH) most = larger(load(x + i), most);
  for (; i < n; i++) top = x[i] > top ? x[i] : top;
  const float in_vectors = largest(most);
  top = in_vectors > top ? in_vectors : top;
  for (i = 0; i + WIDTH <= n; i += WIDTH) {
    V e = exponential(load(x + i) - top);
    store(out + i, e);
    sums += e;
  }
  if (i < n) { /* in the same places as in a longer row */
    memcpy(rest, x + i, 4 * (n - i));
    V e = exponential(load(rest) - top);
    for (size_t j = 0; j < WIDTH; j++) rest[j] = j < n - i ? e[j] : 0;
    memcpy(out + i, rest, 4 * (n - i));
    sums += load(rest);
  }
  const float factor = 1.0f / total(sums);
  for (i = 0; i + WIDTH <= n; i += WIDTH) store(out + i, load(out + i) * factor);
  for (; i < n; i++) out[i] *= factor;
}

/* The sum of rows of n numbers, each times its weight, and of what is added; NULL: nothing. */
void mix(const float *rows, const float *weights, size_t count, const float *added, float *out, size_t n) {
  auto sum = [&](auto load, size_t i) {
    auto sum = load(rows + i) * weights[0];
    for (size_t row = 1; row < count; row++) sum += load(rows + row * n + i) * weights[row];
    return added ? sum + load(added + i) : sum;
  };
  size_t i = 0;
  for (; i + WIDTH <= n; i += WIDTH) store(out + i, sum([](const float *p) { return load(p); }, i));
  for (; i < n; i++) out[i] = sum([](const float *p) { return *p; }, i);
}

/* Vector by vector of channels, so that the weights of one stay in registers for all rows. */
template <int TAPS> __attribute__((noinline)) void convolve_rows(const Convolution &a, const float *const *x, size_t rows, float *out) {
  for (size_t i = 0; i < a.n; i += WIDTH) {
    const size_t at = least(i, a.n - WIDTH); /* the last vector: some channels once more */
    V weights[TAPS], bias = a.bias ? load(a.bias + at) : V{};
    UNROLLED for (int t = 0; t < TAPS; t++) UNROLLED for (int j = 0; j < WIDTH; j++) weights[t][j] = a.weight[(at + j) * TAPS + t];
    for (size_t row = 0; row < rows; row++) {
      V sum = load(x[row] + at) * weights[0];
      UNROLLED for (int t = 1; t < TAPS; t++) sum += load(x[row + t * a.dilation] + at) * weights[t];
      if (a.bias) sum += bias;
      store(out + row * a.n + at, a.silu ? sum * sigmoid(sum) : sum);
    }
  }
}

void convolve(const Convolution &a, const float *const *x, size_t rows, float *out) {
  constexpr decltype(&convolve_rows<2>) by_taps[] = {convolve_rows<2>, convolve_rows<3>, convolve_rows<4>, convolve_rows<5>, convolve_rows<6>, convolve_rows<7>, convolve_rows<8>};
  by_taps[a.taps - FEWEST_TAPS](a, x, rows, out);
}

}  // namespace

#include "scans.h"

extern const Kernels TABLE;
const Kernels TABLE = {WIDTH, take, product, unpack, weigh_packed, attend, rms_norm, layer_norm, rope, apply, scan, gates, softmax, mix, convolve, to_float, from_float};
