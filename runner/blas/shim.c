/* A fast BLAS for MLX's CPU wheel, which links the single-threaded Netlib reference BLAS.
 *
 * libmlx.so imports exactly three CBLAS functions. Loaded with RTLD_GLOBAL before libmlx.so, this file provides them and
 * forwards each call to the OpenBLAS inside numpy's wheel, whose functions take 64-bit sizes and are passed once to
 * shim_use(). Products with few rows (a decode step has one row per sequence) are computed here or go to gemv: gemm would
 * first pack the whole weight matrix, which costs more than the product. MLX passes row-major operands only. */
#include <stdint.h>
#include <string.h>

typedef int64_t size64;
typedef void (*sgemm_fn)(int, int, int, size64, size64, size64, float, const float *, size64, const float *, size64, float,
                         float *, size64);
typedef void (*dgemm_fn)(int, int, int, size64, size64, size64, double, const double *, size64, const double *, size64,
                         double, double *, size64);
typedef void (*cgemm_fn)(int, int, int, size64, size64, size64, const void *, const void *, size64, const void *, size64,
                         const void *, void *, size64);
typedef void (*sgemv_fn)(int, int, size64, size64, float, const float *, size64, const float *, size64, float, float *,
                         size64);
typedef void (*threads_fn)(int);

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112, FEW_ROWS = 4 };

/* Products of up to MOST_ROWS rows with a transposed matrix; NULL where the processor has no wide vectors. */
typedef void (*rows_fn)(int, size64, size64, float, const float *, size64, const float *, size64, float, float *, size64);
enum { MOST_ROWS = 8, MOST_WIDE = 8 };

#if defined(__x86_64__) && defined(__GNUC__)
#define NAME(WORD) WORD##_avx512
#define TARGET "avx512f"
#define WIDTH 16
#define REGISTERS 32
#include "rows.h"

#define NAME(WORD) WORD##_avx2
#define TARGET "avx2,fma"
#define WIDTH 8
#define REGISTERS 16
#include "rows.h"

static rows_fn find_rows(void) {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return rows_avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return rows_avx2;
  return NULL;
}
#else
static rows_fn find_rows(void) { return NULL; }
#endif

static sgemm_fn sgemm;
static dgemm_fn dgemm;
static cgemm_fn cgemm;
static sgemv_fn sgemv;
static rows_fn few_rows;
static threads_fn set_threads;
static int threads_for_many, threads_for_few, threads_now;

/* `many` and `few` are the numbers of threads for products of many and of few rows. Where products of few rows may use
 * several, the other library computes them too. */
void shim_use(sgemm_fn s, dgemm_fn d, cgemm_fn c, sgemv_fn v, threads_fn t, int many, int few) {
  sgemm = s;
  dgemm = d;
  cgemm = c;
  sgemv = v;
  set_threads = t;
  threads_for_many = threads_now = many;
  threads_for_few = few;
  few_rows = few == 1 ? find_rows() : NULL;
  set_threads(many);
}

static void use_threads(int rows) {
  int wanted = rows <= MOST_ROWS ? threads_for_few : threads_for_many;
  if (wanted == threads_now) return;
  set_threads(wanted);
  threads_now = wanted;
}

static int64_t calls;

/* The number of products so far: proof that MLX calls this file and not its own BLAS. */
int64_t shim_calls(void) { return calls; }

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
  calls++;
  if (few_rows && order == ROW_MAJOR && trans_a == NO_TRANS && trans_b == TRANS && m <= MOST_ROWS) {
    few_rows(m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    return;
  }
  use_threads(m);
  if (order == ROW_MAJOR && trans_a == NO_TRANS && m <= FEW_ROWS && k > 0) { /* gemv does nothing for k == 0 */
    for (int row = 0; row < m; row++) {
      const float *x = a + (size64)row * lda;
      float *y = c + (size64)row * ldc;
      if (trans_b == NO_TRANS)
        sgemv(ROW_MAJOR, TRANS, k, n, alpha, b, ldb, x, 1, beta, y, 1);
      else
        sgemv(ROW_MAJOR, NO_TRANS, n, k, alpha, b, ldb, x, 1, beta, y, 1);
    }
    return;
  }
  sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_dgemm(int order, int trans_a, int trans_b, int m, int n, int k, double alpha, const double *a, int lda,
                 const double *b, int ldb, double beta, double *c, int ldc) {
  dgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_cgemm(int order, int trans_a, int trans_b, int m, int n, int k, const void *alpha, const void *a, int lda,
                 const void *b, int ldb, const void *beta, void *c, int ldc) {
  cgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
