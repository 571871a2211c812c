/* Products with weights of 4 or 8 bits, in integers: included by `simd.h`, for AVX2 and AVX-512.
 *
 * A row of x is rounded to integers of 16 bits, with a scale for each group of its numbers: by 1/65,534 of the group's
 * largest one at most, 2^7 times as fine as bfloat16 rounds that one. Products within a group are added up exactly, in any
 * order; only then scales come in, one group after the other. So an instruction multiplies twice as many numbers as in
 * float32, weights are unpacked by a shift and a mask, and results are equal to the bit for vectors of any width.
 *
 * The lanes of a vector are the outputs of a block. A lane of 32 bits holds a word of packed codes, a pair of codes, or a
 * sum. */

/* By instruction set: the nearest integers; `sum` and the products of two pairs of integers of 16 bits; the first `count`
 * words from `p` on, then zeros; twice the numbers that pairs of 4-bit codes stand for; elements 0 and 2, or 1 and 3, of
 * each quarter of two vectors; every other quarter of the first, then of the second one. */
const int8_t FP4_TWICE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
#if WIDTH == 16
INLINE I nearest(V x) { return (I)_mm512_cvtps_epi32((__m512)x); }
INLINE I dot(I sum, I a, I b) { return (I)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b); }
INLINE I load_words(const void *p, size_t count) { return (I)_mm512_maskz_loadu_epi32((__mmask16)((1 << count) - 1), p); }
INLINE I twice_fp4(I codes) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)FP4_TWICE));
  return (I)_mm512_permutexvar_epi16((__m512i)codes, _mm512_cvtepi8_epi16(table));
}
template <int ODD> INLINE I alternate(I a, I b) { return (I)_mm512_shuffle_ps((__m512)a, (__m512)b, ODD ? 0xdd : 0x88); }
template <int ODD> INLINE I alternate_quarters(I a, I b) { return (I)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, ODD ? 0xdd : 0x88); }
#else
INLINE I nearest(V x) { return (I)_mm256_cvtps_epi32((__m256)x); }
INLINE I dot(I sum, I a, I b) { return sum + (I)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
INLINE I load_words(const void *p, size_t count) {
  const I lane = {0, 1, 2, 3, 4, 5, 6, 7};
  return (I)_mm256_maskload_epi32((const int *)p, (__m256i)(lane < (int32_t)count));
}
INLINE I twice_fp4(I codes) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)FP4_TWICE));
  return (I)_mm256_srai_epi16(_mm256_slli_epi16(_mm256_shuffle_epi8(table, (__m256i)codes), 8), 8); /* with its sign */
}
template <int ODD> INLINE I alternate(I a, I b) { return (I)_mm256_shuffle_ps((__m256)a, (__m256)b, ODD ? 0xdd : 0x88); }
template <int ODD> INLINE I alternate_quarters(I a, I b) { return (I)_mm256_permute2x128_si256((__m256i)a, (__m256i)b, ODD ? 0x31 : 0x20); }
#endif

/* A pair of integers, for all outputs. */
INLINE I pair_at(const int16_t *x) { return all((int32_t) * (const Word *)x); }

/* Turns the rows of a square into columns. */
INLINE void transpose(I (&rows)[WIDTH]) {
  UNROLLED for (int apart = 1; apart < WIDTH; apart *= 2)
    UNROLLED for (int i = 0; i < WIDTH; i++) {
      if (i & apart) continue;
      const I a = rows[i], b = rows[i + apart];
      rows[i] = apart < 4 ? alternate<0>(a, b) : alternate_quarters<0>(a, b);
      rows[i + apart] = apart < 4 ? alternate<1>(a, b) : alternate_quarters<1>(a, b);
    }
}

/* How weights of one format are computed with. Codes i and i + PAIRS of a word are a pair. */
template <int BITS, int GROUP, int MODE> struct Integers {
  static constexpr bool SERVE = BITS == 4 || (BITS == 8 && MODE == AFFINE);
  static constexpr int HELD = 32 / BITS, PAIRS = HELD / 2, WORDS = GROUP / HELD; /* codes and pairs of a word; words of a group */

  INLINE I pair(I words, int i) {
    const I codes = (I)((U)words >> (i * BITS)) & ((1 << BITS) - 1) * 0x10001;
    return MODE == AFFINE ? codes : twice_fp4(codes);
  }
};

/* A row of x: integers, pair by pair; of each group the scale, and the sum of what the integers stand for. */
struct Row {
  const int16_t *x;
  const float *scales, *sums;

  INLINE Row of(const Product &a, size_t row) {
    const int16_t *x = (const int16_t *)(a.x + row * a.ldx);
    const float *scales = (const float *)(x + a.k);
    return {x, scales, scales + a.k / a.group};
  }
};

/* Rounds a row. The integers, scales and sums take less room than k float32 numbers. */
template <int PAIRS> void take_integers(const void *x, int type, size_t k, size_t group, float *out) {
  const float largest_integer = 32767;
  const size_t groups = k / group;
  int16_t *numbers = (int16_t *)out;
  float *scales = (float *)(numbers + k), *sums = scales + groups;
  I first; /* places of the lower halves of pairs */
  UNROLLED for (int i = 0; i < WIDTH; i++) first[i] = i / PAIRS * 2 * PAIRS % WIDTH + i % PAIRS;
  for (size_t g = 0; g < groups; g++) {
    I bits = {}, sum = {};
    for (size_t i = 0; i < group; i += WIDTH) { /* as bits, NaN is larger than any number */
      const I each = (I)load_as(x, type, g * group + i) & 0x7fffffff;
      bits = each > bits ? each : bits;
    }
    int32_t most = 0;
    uint32_t total = 0; /* wraps, where numbers are infinite */
    UNROLLED for (int i = 0; i < WIDTH; i++) most = bits[i] > most ? bits[i] : most;
    float top;
    memcpy(&top, &most, 4);
    const float factor = top < 1e-33f ? 0 : largest_integer / top; /* infinite for smaller ones */
    for (size_t i = 0; i < group; i += WIDTH, numbers += WIDTH) {
      const I rounded = nearest(load_as(x, type, g * group + i) * factor);
      const I pairs = (__builtin_shuffle(rounded, first) & 0xffff) | __builtin_shuffle(rounded, first + PAIRS) << 16;
      memcpy(numbers, &pairs, 2 * WIDTH);
      sum += rounded;
    }
    UNROLLED for (int i = 0; i < WIDTH; i++) total += (uint32_t)sum[i];
    scales[g] = top / largest_integer;
    sums[g] = scales[g] * (float)(int32_t)total;
  }
}

/* Fetches a line into the second-level cache: the first one cannot wait for so many lines at a time, but for those of
 * scales, which are few. */
INLINE void fetch(const void *p) { __builtin_prefetch(p, 0, 2); }
enum { FETCHED_AHEAD = 384 /* words of each output. With half of them, cold weights take up to 1.3 times as long */ };

/* WIDTH outputs of a product from `n` on: where the words of each begin. Those beyond the end repeat the last one. */
struct Block {
  size_t words, outputs[WIDTH];
  const uint8_t *p[WIDTH];

  explicit Block(const Product &a, size_t n) : words(a.k * a.bits / 32) {
    for (int i = 0; i < WIDTH; i++) {
      outputs[i] = least(n + i, a.n - 1);
      p[i] = a.w + 4 * words * outputs[i];
    }
  }

  /* Words `at` to at + WIDTH of all outputs, or up to the end: one of all outputs in each vector. */
  INLINE void load(const Block &b, size_t at, I (&out)[WIDTH]) {
    const size_t count = least(b.words - at, WIDTH), next = at + FETCHED_AHEAD;
    const size_t fetched = next < b.words ? next : next + (WIDTH - 1) * b.words; /* of the next block */
    UNROLLED for (int i = 0; i < WIDTH; i++) {
      out[i] = load_words(b.p[i] + 4 * at, count);
      fetch(b.p[i] + 4 * fetched);
    }
    transpose(out);
  }
};

/* `count` scales, or biases, from group `first` on, of a block's outputs: those of all outputs together. */
template <int MODE>
__attribute__((noinline)) void load_scales(const void *p, int type, const Block &b, size_t groups, size_t first, int count, float (*out)[WIDTH]) {
  for (int at = 0; at < count; at += WIDTH) {
    const int some = (int)least(count - at, WIDTH);
    I rows[WIDTH];
    float room[WIDTH];
    for (int i = 0; i < WIDTH; i++) {
      const size_t place = b.outputs[i] * groups + first + at;
      rows[i] = load_words(scales_of<MODE>(p, type, place, some, room), some);
      __builtin_prefetch((const char *)p + (place + WIDTH * groups) * (MODE == AFFINE ? size_of(type) : 1));
    }
    transpose(rows);
    for (int i = 0; i < some; i++) store(out[at + i], (V)rows[i] * (MODE == AFFINE ? 1.0f : 0.5f)); /* of twice the numbers */
  }
}

/* Adds to the sums of a row those of a group. */
template <int MODE> INLINE V with_group(V sum, I in_group, const float *scales, const float *biases, const Row &row, size_t g) {
  sum += __builtin_convertvector(in_group, V) * (load(scales) * row.scales[g]);
  if (MODE == AFFINE) sum += load(biases) * row.sums[g];
  return sum;
}

/* Stores the sums of a row and a block, up to output `to`. */
INLINE void put_block(const Product &a, V sums, size_t row, size_t n, size_t to) {
  const size_t at = (a.order ? a.order[row] : row) * a.n + n, count = least(to - n, WIDTH);
  if (count < WIDTH || a.out_type != F32) return put_sums(a, at, (const float *)&sums, count);
  if (a.bias) sums += load(a.bias + n);
  store((float *)a.out + at, a.added ? sums + load(a.added + at) : sums);
}

/* All R rows and a block, unpacked in registers. */
template <int BITS, int GROUP, int MODE, int R> __attribute__((noinline)) void few_in_integers(const Product &a, size_t n, size_t to) {
  typedef Integers<BITS, GROUP, MODE> F;
  constexpr int CHAINS = R == 1 ? 4 : R == 2 ? 2 : 1; /* of sums: each waits for the one before */
  constexpr int TOGETHER = R <= FEW ? WIDTH : F::WORDS < 4 ? F::WORDS : 4; /* words in a turn of the loop: with more rows, code for all of them is long */
  const Block b(a, n);
  const size_t groups = a.k / GROUP, words = a.k / F::HELD;
  float scales[CHUNK][WIDTH], biases[CHUNK][WIDTH];
  Row rows[R];
  V sums[R];
  I in_group[R][CHAINS];
  UNROLLED for (int r = 0; r < R; r++) {
    rows[r] = Row::of(a, r);
    sums[r] = V{};
    UNROLLED for (int c = 0; c < CHAINS; c++) in_group[r][c] = I{};
  }
  for (size_t at = 0, g = 0; at < words; at += WIDTH) {
    if (at % (CHUNK * F::WORDS) == 0) {
      const int count = (int)least(groups - g, CHUNK);
      load_scales<MODE>(a.scales, a.scale_type, b, groups, g, count, scales);
      if (MODE == AFFINE) load_scales<MODE>(a.biases, a.scale_type, b, groups, g, count, biases);
    }
    I codes[WIDTH];
    Block::load(b, at, codes);
    size_t first = 0;
    do {
      UNROLLED for (int w = 0; w < TOGETHER; w++) {
        UNROLLED for (int i = 0; i < F::PAIRS; i++) {
          const I pair = F::pair(codes[first + w], i);
          UNROLLED for (int r = 0; r < R; r++) {
            I &sum = in_group[r][(w * F::PAIRS + i) % CHAINS];
            sum = dot(sum, pair, pair_at(rows[r].x + (at + first + w) * F::HELD + 2 * i));
          }
        }
        if (F::WORDS > TOGETHER ? w + 1 < TOGETHER || (at + first + TOGETHER) % F::WORDS : (w + 1) % F::WORDS) continue; /* within a group */
        UNROLLED for (int r = 0; r < R; r++) {
          UNROLLED for (int c = 1; c < CHAINS; c++) in_group[r][0] += in_group[r][c];
          sums[r] = with_group<MODE>(sums[r], in_group[r][0], scales[g % CHUNK], biases[g % CHUNK], rows[r], g);
          UNROLLED for (int c = 0; c < CHAINS; c++) in_group[r][c] = I{};
        }
        if (++g == groups) break;
      }
    } while (TOGETHER < WIDTH && (first += TOGETHER) < WIDTH && g < groups);
  }
  UNROLLED for (int r = 0; r < R; r++) put_block(a, sums[r], r, n, to);
}

/* A block, unpacked: pairs, then scales, then biases, of all outputs together. */
template <int BITS, int MODE> __attribute__((noinline)) void unpack_block(const Product &a, size_t n, float *out) {
  typedef Integers<BITS, 32, MODE> F; /* whose words are alike for every group */
  const Block b(a, n);
  const size_t groups = a.k / a.group, words = a.k / F::HELD;
  float(*scales)[WIDTH] = (float(*)[WIDTH])(out + a.k / 2 * WIDTH);
  load_scales<MODE>(a.scales, a.scale_type, b, groups, 0, (int)groups, scales);
  if (MODE == AFFINE) load_scales<MODE>(a.biases, a.scale_type, b, groups, 0, (int)groups, scales + groups);
  for (size_t at = 0; at < words; at += WIDTH) {
    I codes[WIDTH];
    Block::load(b, at, codes);
    UNROLLED for (int w = 0; w < WIDTH; w++) {
      if (at + w == words) break;
      UNROLLED for (int i = 0; i < F::PAIRS; i++, out += WIDTH) store(out, (V)F::pair(codes[w], i));
    }
  }
}

/* float32 numbers that a block takes, unpacked. */
INLINE size_t block_room(const Product &a) { return WIDTH * (a.k / 2 + 2 * (a.k / a.group)); }

/* R rows from `row` on and B blocks from output `n` on, unpacked in `w`. */
template <int GROUP, int MODE, int R, int B>
__attribute__((noinline)) void many_in_integers(const Product &a, const float *w, size_t row, size_t n, size_t to) {
  const size_t groups = a.k / GROUP, room = block_room(a);
  Row rows[R];
  V sums[B][R];
  UNROLLED for (int r = 0; r < R; r++) rows[r] = Row::of(a, row + r);
  UNROLLED for (int b = 0; b < B; b++) UNROLLED for (int r = 0; r < R; r++) sums[b][r] = V{};
  for (size_t g = 0; g < groups; g++) {
    I in_group[B][R];
    UNROLLED for (int b = 0; b < B; b++) UNROLLED for (int r = 0; r < R; r++) in_group[b][r] = I{};
    const float *words = w + g * (GROUP / 2 * WIDTH);
    const int16_t *numbers[R];
    UNROLLED for (int r = 0; r < R; r++) numbers[r] = rows[r].x + g * GROUP;
    _Pragma("GCC unroll 4") for (int i = 0; i < GROUP / 2; i++) {
      I pairs[B];
      UNROLLED for (int b = 0; b < B; b++) pairs[b] = (I)load(words + b * room + i * WIDTH);
      UNROLLED for (int r = 0; r < R; r++) {
        const I x = pair_at(numbers[r] + 2 * i);
        UNROLLED for (int b = 0; b < B; b++) in_group[b][r] = dot(in_group[b][r], pairs[b], x);
      }
    }
    UNROLLED for (int b = 0; b < B; b++) {
      const float *scales = w + b * room + (a.k / 2 + g) * WIDTH, *biases = scales + groups * WIDTH;
      UNROLLED for (int r = 0; r < R; r++) sums[b][r] = with_group<MODE>(sums[b][r], in_group[b][r], scales, biases, rows[r], g);
    }
  }
  UNROLLED for (int b = 0; b < B; b++) UNROLLED for (int r = 0; r < R; r++) put_block(a, sums[b][r], row + r, n + b * WIDTH, to);
}

/* Outputs `from` to `to`. `scratch` holds that many rows of k float32 numbers, counted in blocks. */
template <int BITS, int GROUP, int MODE> void product_in_integers(const Product &a, size_t from, size_t to, float *scratch) {
  constexpr int FEW_ROWS = REGISTERS == 32 ? 8 : 4, MANY_ROWS = REGISTERS == 32 ? 6 : 4;
  if (a.m <= FEW_ROWS) {
    for (size_t n = from; n < to; n += WIDTH)
      with_count<FEW_ROWS>(a.m, [&](auto rows) { few_in_integers<BITS, GROUP, MODE, rows.COUNT>(a, n, to); });
    return;
  }
  for (size_t n = from; n < to; n += WIDTH) unpack_block<BITS, MODE>(a, n, scratch + (n - from) / WIDTH * block_room(a));
  /* More than FEW_ROWS rows make tiles of MANY_ROWS - 2 rows at least. */
  in_tiles(a.m, MANY_ROWS, [&](size_t row, size_t count, size_t, size_t) {
    with_count<MANY_ROWS, MANY_ROWS - 2>(count, [&](auto rows) {
      for (size_t n = from; n < to; n += 2 * WIDTH) {
        const float *w = scratch + (n - from) / WIDTH * block_room(a);
        if (n + WIDTH < to) many_in_integers<GROUP, MODE, rows.COUNT, 2>(a, w, row, n, to);
        else many_in_integers<GROUP, MODE, rows.COUNT, 1>(a, w, row, n, to);
      }
    });
  });
}
