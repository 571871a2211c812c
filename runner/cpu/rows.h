/* Products of rows with a matrix, transposed or not.
 *
 * The terms of a sum are added in the same order for any number of rows, so the numbers of a token depend neither on the
 * other rows of its batch nor on where its prompt is cut. A sum with a column of a transposed matrix is one of vectors
 * along k, whose elements are added up after each AT_ONCE numbers; otherwise vectors lie along the columns, and a sum has
 * its terms one after the other. gemm would pack the whole weight for the single row of a decode step, and gemv would read
 * it once per row. Here each weight is read once for few rows; many rows share a strip of weights in the cache.
 *
 * Included once per instruction set: TARGET is the compiler's name for it, WIDTH the number of floats in a vector,
 * TILE_ROWS the most rows whose sums with four columns fit into registers, SUMS the vectors of sums that do; LOADED and
 * STORE leave alone what lies behind the first numbers of a vector; NAME makes its own names. */
#define INLINE static inline __attribute__((always_inline, target(TARGET)))
#define UNROLLED _Pragma("GCC unroll 8")

typedef float NAME(vector) __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t NAME(places) __attribute__((vector_size(4 * WIDTH)));

/* Returns the sums of the elements of four vectors, or of one: adds neighbours, then pairs, then quarters. */
INLINE quarter NAME(totals)(const NAME(vector) *sums, int count) {
  NAME(places) even, odd; /* of two vectors, in each quarter: the first two places from one, the others from the other */
  UNROLLED for (int i = 0; i < WIDTH; i++) {
    even[i] = i / 4 * 4 + i % 2 * 2 + i % 4 / 2 * WIDTH;
    odd[i] = even[i] + 1;
  }
  NAME(vector) a = sums[0], b = sums[1 % count], c = sums[2 % count], d = sums[3 % count];
  a = __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
  c = __builtin_shuffle(c, d, even) + __builtin_shuffle(c, d, odd);
  a = __builtin_shuffle(a, c, even) + __builtin_shuffle(a, c, odd);
  const quarter *p = (const quarter *)&a;
#if WIDTH == 16
  return (p[0] + p[2]) + (p[1] + p[3]);
#else
  return p[0] + p[1];
#endif
}

/* Computes the first `wide` columns over `k` numbers of `rows` rows, and adds them to c times `beta`. `rows` and `wide` are
 * constants at every expansion, so the sums stay in registers. */
INLINE void NAME(block)(int rows, int wide, size64 k, float alpha, const float *a, size64 lda, const float *b, size64 ldb,
                        float beta, float *c, size64 ldc) {
  NAME(vector) sums[TILE_ROWS][8], x[TILE_ROWS], weights;
  UNROLLED for (int i = 0; i < wide; i++)
    UNROLLED for (int row = 0; row < rows; row++) sums[row][i] = (NAME(vector)){0};
  size64 left = k % WIDTH, even = k - left;
  for (size64 at = 0; at < even; at += WIDTH) {
    UNROLLED for (int row = 0; row < rows; row++) x[row] = *(const NAME(vector) *)(a + row * lda + at);
    UNROLLED for (int i = 0; i < wide; i++) {
      weights = *(const NAME(vector) *)(b + i * ldb + at);
      UNROLLED for (int row = 0; row < rows; row++) sums[row][i] += x[row] * weights;
    }
  }
  if (left) {
    UNROLLED for (int row = 0; row < rows; row++) x[row] = (NAME(vector))LOADED(a + row * lda + even, left);
    UNROLLED for (int i = 0; i < wide; i++) {
      weights = (NAME(vector))LOADED(b + i * ldb + even, left);
      UNROLLED for (int row = 0; row < rows; row++) sums[row][i] += x[row] * weights;
    }
  }
  UNROLLED for (int row = 0; row < rows; row++)
    UNROLLED for (int i = 0; i < wide; i += 4) {
      float *y = c + row * ldc + i;
      quarter totals = alpha * NAME(totals)(sums[row] + i, wide < 4 ? 1 : 4);
      if (wide < 4) *y = beta == 0 ? totals[0] : totals[0] + beta * *y;
      else if (beta == 0) *(quarter *)y = totals;
      else *(quarter *)y = totals + beta * *(quarter *)y;
    }
}

/* Computes `n` columns over `k` numbers of `rows` rows. */
INLINE void NAME(tile)(int rows, size64 n, size64 k, float alpha, const float *a, size64 lda, const float *b, size64 ldb,
                       float beta, float *c, size64 ldc) {
  const int wide = WIDTH * rows < 16 ? 8 : 4; /* a single row has registers for eight sums */
  size64 at = 0;
  for (; at + wide <= n; at += wide) NAME(block)(rows, wide, k, alpha, a, lda, b + at * ldb, ldb, beta, c + at, ldc);
  for (; at < n; at++) NAME(block)(rows, 1, k, alpha, a, lda, b + at * ldb, ldb, beta, c + at, ldc);
}

/* c[m, n] = alpha * sum_k a[m, k] * b[n, k] + beta * c[m, n]. */
static __attribute__((target(TARGET))) void NAME(rows)(size64 m, size64 n, size64 k, float alpha, const float *a, size64 lda,
                                                       const float *b, size64 ldb, float beta, float *c, size64 ldc) {
  static _Thread_local float copied[STRIP * AT_ONCE]; /* for many rows: lines far apart would push each other out of the cache */
  const size64 wide = m > COPIED_FROM ? STRIP : 8, tiles = (m + TILE_ROWS - 1) / TILE_ROWS;
  for (size64 column = 0; column < n; column += wide) {
    const size64 columns = n - column < wide ? n - column : wide;
    for (size64 at = 0; at == 0 || at < k; at += AT_ONCE) {
      const size64 count = k - at < AT_ONCE ? k - at : AT_ONCE;
      const float *weights = b + column * ldb + at;
      for (size64 i = 0; m > COPIED_FROM && i < columns; i++) memcpy(copied + i * AT_ONCE, weights + i * ldb, 4 * count);
      for (size64 tile = 0, row = 0, rows; tile < tiles; tile++, row += rows) {
        rows = (m - row + tiles - tile - 1) / (tiles - tile); /* nearly alike */
        switch (rows) {
#define CASE(ROWS) \
  case ROWS: \
    NAME(tile)(ROWS, columns, count, alpha, a + row * lda + at, lda, m > COPIED_FROM ? copied : weights, m > COPIED_FROM ? AT_ONCE : ldb, at ? 1 : beta, c + row * ldc + column, ldc); \
    break
          CASE(1);
          CASE(2);
          CASE(3);
#if TILE_ROWS > 3
          CASE(4);
          CASE(5);
          CASE(6);
#endif
#undef CASE
        }
      }
    }
  }
}

/* Adds `count` terms to the sums of `rows` rows with `vectors` vectors of columns, or, if `columns` is not 0, with so many
 * columns of one. From a row to the next it is `step` numbers, from a term to the next `next`. */
INLINE void NAME(weigh)(int rows, int vectors, int columns, size64 count, const float *a, size64 step, size64 next,
                        const float *b, size64 ldb, float beta, float *c, size64 ldc) {
  NAME(vector) sums[MOST_ROWS][8], weights[8];
  UNROLLED for (int row = 0; row < rows; row++)
    UNROLLED for (int i = 0; i < vectors; i++) {
      const float *y = c + row * ldc + i * WIDTH;
      if (beta == 0) sums[row][i] = (NAME(vector)){0};
      else sums[row][i] = beta * (columns ? (NAME(vector))LOADED(y, columns) : *(const NAME(vector) *)y);
    }
#define LINE \
  { \
    UNROLLED for (int i = 0; i < vectors; i++) \
      weights[i] = columns ? (NAME(vector))LOADED(b, columns) : *(const NAME(vector) *)(b + i * WIDTH); \
    UNROLLED for (int row = 0; row < rows; row++) \
      UNROLLED for (int i = 0; i < vectors; i++) sums[row][i] += a[row * step] * weights[i]; \
    a += next, b += ldb; \
  }
  if (__builtin_constant_p(count)) _Pragma("GCC unroll 12") for (size64 at = 0; at < count; at++) LINE
  else for (size64 at = 0; at < count; at++) LINE
#undef LINE
  UNROLLED for (int row = 0; row < rows; row++)
    UNROLLED for (int i = 0; i < vectors; i++) {
      float *y = c + row * ldc + i * WIDTH;
      if (columns) STORE(y, columns, sums[row][i]);
      else *(NAME(vector) *)y = sums[row][i];
    }
}

/* c[m, n] = beta * c[m, n] + sum_k a[m, k] * b[k, n]. */
static __attribute__((target(TARGET))) void NAME(columns)(size64 m, size64 n, size64 k, const float *a, size64 step, size64 next,
                                                          const float *b, size64 ldb, float beta, float *c, size64 ldc) {
  static _Thread_local float copied[STRIP * AT_ONCE] __attribute__((aligned(64)));
  const int many = m > MANY_ROWS;
  const size64 wide = many ? STRIP : n, tall = many ? AT_ONCE : LINES, tiles = (m + MOST_ROWS - 1) / MOST_ROWS;
  for (size64 column = 0; column < n; column += wide) {
    const size64 columns = n - column < wide ? n - column : wide;
    for (size64 at = 0; at == 0 || at < k; at += tall) {
      const size64 count = k - at < tall ? k - at : tall;
      const float *weights = b + at * ldb + column;
      for (size64 i = 0; many && i < count; i++) memcpy(copied + i * STRIP, weights + i * ldb, 4 * columns);
      for (size64 tile = 0, row = 0, rows; tile < tiles; tile++, row += rows) {
        rows = (m - row + tiles - tile - 1) / (tiles - tile); /* nearly alike */
        switch (rows) {
#define WEIGH(ROWS, VECTORS, COLUMNS, COUNT) \
  NAME(weigh)(ROWS, VECTORS, COLUMNS, COUNT, a + row * step + at * next, step, next, (many ? copied : weights) + i, many ? STRIP : ldb, at ? 1 : beta, c + row * ldc + column + i, ldc)
#define CASE(ROWS) \
  case ROWS: { \
    const int vectors = SUMS / ROWS < 8 ? SUMS / ROWS : 8; \
    size64 i = 0; \
    if (count == LINES) /* whole lines of the cache, so that it fetches the next ones */ \
      for (; i + 16 <= columns; i += 16) WEIGH(ROWS, 16 / WIDTH, 0, LINES); \
    for (; i + vectors * WIDTH <= columns; i += vectors * WIDTH) WEIGH(ROWS, vectors, 0, count); \
    for (; i + WIDTH <= columns; i += WIDTH) WEIGH(ROWS, 1, 0, count); \
    if (i < columns) WEIGH(ROWS, 1, columns - i, count); \
    break; \
  }
          CASE(1);
          CASE(2);
          CASE(3);
          CASE(4);
          CASE(5);
          CASE(6);
#undef CASE
#undef WEIGH
        }
      }
    }
  }
}

#undef INLINE
#undef UNROLLED
#undef LOADED
#undef STORE
#undef SUMS
#undef NAME
#undef TARGET
#undef WIDTH
#undef TILE_ROWS
