/* A fast BLAS for MLX's CPU wheel, which links the single-threaded Netlib reference BLAS.
 *
 * libmlx.so imports exactly three CBLAS functions. Loaded with RTLD_GLOBAL before libmlx.so, this file provides them.
 * Products of float32 are computed here (rows.h), where the processor has wide vectors. Others go to the OpenBLAS inside
 * numpy's wheel, whose functions take 64-bit sizes and are passed once to shim_use(): few rows go to gemv, since gemm
 * would first pack the whole matrix, which costs more than the product. Large products are computed in blocks, which
 * threads may share. MLX passes row-major operands only. */
#include <malloc.h>
#include <stdint.h>
#include <string.h>

#include "pool.h"

typedef int64_t size64;
typedef void (*sgemm_fn)(int, int, int, size64, size64, size64, float, const float *, size64, const float *, size64, float,
                         float *, size64);
typedef void (*dgemm_fn)(int, int, int, size64, size64, size64, double, const double *, size64, const double *, size64,
                         double, double *, size64);
typedef void (*cgemm_fn)(int, int, int, size64, size64, size64, const void *, const void *, size64, const void *, size64,
                         const void *, void *, size64);
typedef void (*sgemv_fn)(int, int, size64, size64, float, const float *, size64, const float *, size64, float, float *,
                         size64);

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112, FEW_ROWS = 4 };

/* The types of functions for products with a transposed matrix and with another one. */
typedef void (*rows_fn)(size64, size64, size64, float, const float *, size64, const float *, size64, float, float *, size64);
typedef void (*columns_fn)(size64, size64, size64, const float *, size64, size64, const float *, size64, float, float *, size64);
enum {
  MOST_ROWS = 6,    /* of a tile */
  LINES = 12,       /* of a matrix that few rows take at a time */
  ANSWERS = 8,      /* the most rows of a decode step */
  COPIED_FROM = 24, /* rows, beyond which transposed weights are copied */
  MANY_ROWS = 16,   /* those for others */
  STRIP = 64,       /* columns of both */
  AT_ONCE = 768,    /* numbers of a row: a strip of them stays in the second-level cache */
  TURNED = 1 << 14, /* numbers copied at once, of rows whose numbers do not lie together */
};

static rows_fn rows_of; /* both are NULL where the processor has no wide vectors */
static columns_fn columns_of;

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

typedef float quarter __attribute__((vector_size(16), aligned(4), may_alias));

#define NAME(WORD) WORD##_avx512
#define TARGET "avx512f"
#define WIDTH 16
#define TILE_ROWS 6
#define SUMS 24
#define LOADED(PLACE, COUNT) _mm512_maskz_loadu_ps((__mmask16)((1u << (COUNT)) - 1), PLACE)
#define STORE(PLACE, COUNT, NUMBERS) _mm512_mask_storeu_ps(PLACE, (__mmask16)((1u << (COUNT)) - 1), (__m512)(NUMBERS))
#include "rows.h"

#define NAME(WORD) WORD##_avx2
#define TARGET "avx2,fma"
#define WIDTH 8
#define TILE_ROWS 3
#define SUMS 12
#define FIRST(COUNT) (__m256i)((NAME(places)){0, 1, 2, 3, 4, 5, 6, 7} < (int)(COUNT))
#define LOADED(PLACE, COUNT) _mm256_maskload_ps(PLACE, FIRST(COUNT))
#define STORE(PLACE, COUNT, NUMBERS) _mm256_maskstore_ps(PLACE, FIRST(COUNT), (__m256)(NUMBERS))
#include "rows.h"

static void find_kernels(void) {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) rows_of = rows_avx512, columns_of = columns_avx512;
  else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) rows_of = rows_avx2, columns_of = columns_avx2;
}
#else
static void find_kernels(void) {}
#endif

static sgemm_fn sgemm;
static dgemm_fn dgemm;
static cgemm_fn cgemm;
static sgemv_fn sgemv;
static int share_many, share_few;

enum {
  MAPPED = 32 << 20, /* bytes, from which on freed memory goes back at once */
  KEPT = 64 << 20,   /* of freed memory, for each thread that allocates */
};

/* Starts the threads that share products: `many` and `few` are their numbers for products of many and of few rows.
 * Returns the function that shares work among them, for the kernels in front of MLX.
 *
 * From then on, the C library keeps memory that a forward freed for the next one: by default it gives most of it back,
 * and the kernel clears each page again. */
void *shim_start(int many, int few) {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, MAPPED);
  mallopt(M_TRIM_THRESHOLD, KEPT);
  mallopt(M_TOP_PAD, KEPT); /* the only one that threads other than the first heed */
#endif
  share_many = many > 1;
  share_few = few > 1;
  start_threads((many > few ? many : few) - 1);
  return (void *)share;
}

/* Names the functions of another library, which computes on one thread. */
void shim_use(sgemm_fn s, dgemm_fn d, cgemm_fn c, sgemv_fn v) {
  sgemm = s;
  dgemm = d;
  cgemm = c;
  sgemv = v;
  find_kernels();
}

static int64_t calls, shared;

/* The number of products so far: proof that MLX calls this file and not its own BLAS. */
int64_t shim_calls(void) { return calls; }

/* The number of products that threads shared. */
int64_t shim_shared(void) { return shared; }

typedef struct {
  int trans_a, trans_b;
  size64 m, n, k, lda, ldb, ldc;
  float alpha, beta;
  const float *a, *b;
  float *c;
} sgemm_product;

static const float *at(const float *x, size64 ld, int trans, size64 row, size64 column) {
  return trans == NO_TRANS ? x + row * ld + column : x + column * ld + row;
}

/* Computes a part of the result: `rows` x `columns` of it from (`row`, `column`) on. */
static void multiply(const sgemm_product *p, size64 row, size64 rows, size64 column, size64 columns) {
  const float *a = at(p->a, p->lda, p->trans_a, row, 0), *b = at(p->b, p->ldb, p->trans_b, 0, column);
  float *c = p->c + row * p->ldc + column;
  if (rows_of && p->trans_a == NO_TRANS && p->trans_b == TRANS) {
    rows_of(rows, columns, p->k, p->alpha, a, p->lda, b, p->ldb, p->beta, c, p->ldc);
  } else if (rows_of && p->trans_b == TRANS && p->k > 0 && p->k <= TURNED) { /* both are transposed */
    static _Thread_local float turned[TURNED];
    const size64 most = TURNED / p->k;
    for (size64 first = 0; first < rows; first += most) {
      const size64 count = rows - first < most ? rows - first : most;
      for (size64 i = 0; i < p->k; i++)
        for (size64 each = 0; each < count; each++) turned[each * p->k + i] = a[i * p->lda + first + each];
      rows_of(count, columns, p->k, p->alpha, turned, p->k, b, p->ldb, p->beta, c + first * p->ldc, p->ldc);
    }
  } else if (columns_of && p->trans_b == NO_TRANS && p->alpha == 1) {
    const int turned = p->trans_a == TRANS;
    columns_of(rows, columns, p->k, a, turned ? 1 : p->lda, turned ? p->lda : 1, b, p->ldb, p->beta, c, p->ldc);
  } else if (p->trans_a == NO_TRANS && p->m <= FEW_ROWS && p->k > 0) { /* gemv does nothing for k == 0 */
    for (size64 each = 0; each < rows; each++) {
      const float *x = a + each * p->lda;
      float *y = c + each * p->ldc;
      if (p->trans_b == NO_TRANS)
        sgemv(ROW_MAJOR, TRANS, p->k, columns, p->alpha, b, p->ldb, x, 1, p->beta, y, 1);
      else
        sgemv(ROW_MAJOR, NO_TRANS, columns, p->k, p->alpha, b, p->ldb, x, 1, p->beta, y, 1);
    }
  } else {
    sgemm(ROW_MAJOR, p->trans_a, p->trans_b, rows, columns, p->k, p->alpha, a, p->lda, b, p->ldb, p->beta, c, p->ldc);
  }
}

/* The blocks of a product: large enough that packing them costs little, small enough for the threads to share. */
static const double WORTH_SHARING = 4e6; /* operations */
enum { BLOCK_ROWS = 256, BLOCK_COLUMNS = 128 };

static int parts(size64 whole, size64 part) { return (int)((whole + part - 1) / part); }

static void multiply_block(const void *product, int block) {
  const sgemm_product *p = product;
  int across = parts(p->n, BLOCK_COLUMNS);
  size64 row = block / across * (size64)BLOCK_ROWS, column = block % across * (size64)BLOCK_COLUMNS;
  size64 rows = p->m - row < BLOCK_ROWS ? p->m - row : BLOCK_ROWS;
  size64 columns = p->n - column < BLOCK_COLUMNS ? p->n - column : BLOCK_COLUMNS;
  multiply(p, row, rows, column, columns);
}

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
  calls++;
  if (order != ROW_MAJOR) {
    sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    return;
  }
  sgemm_product product = {trans_a, trans_b, m, n, k, lda, ldb, ldc, alpha, beta, a, b, c};
  if (2.0 * m * n * k < WORTH_SHARING) {
    multiply(&product, 0, m, 0, n);
    return;
  }
  int count = parts(m, BLOCK_ROWS) * parts(n, BLOCK_COLUMNS);
  if (count > 1 && (m <= ANSWERS ? share_few : share_many)) {
    shared++;
    share(multiply_block, &product, count, m <= ANSWERS);
  } else {
    for (int block = 0; block < count; block++) multiply_block(&product, block);
  }
}

void cblas_dgemm(int order, int trans_a, int trans_b, int m, int n, int k, double alpha, const double *a, int lda,
                 const double *b, int ldb, double beta, double *c, int ldc) {
  dgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_cgemm(int order, int trans_a, int trans_b, int m, int n, int k, const void *alpha, const void *a, int lda,
                 const void *b, int ldb, const void *beta, void *c, int ldc) {
  cgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
