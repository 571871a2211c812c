/* A fast BLAS in front of MLX's CPU wheel, which links the single-threaded Netlib reference BLAS.
 *
 * libmlx.so imports exactly three CBLAS entry points. Loaded with RTLD_GLOBAL before libmlx.so, this file provides them and
 * forwards each call to the OpenBLAS inside numpy's wheel, whose functions take 64-bit sizes and are handed over once
 * by shim_use(). Products with few rows (a decode step is one row) go to gemv: gemm would first pack the whole weight
 * matrix, which costs more than the product. MLX passes row-major operands only. */
#include <stdint.h>

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

static sgemm_fn sgemm;
static dgemm_fn dgemm;
static cgemm_fn cgemm;
static sgemv_fn sgemv;

void shim_use(sgemm_fn s, dgemm_fn d, cgemm_fn c, sgemv_fn v) {
  sgemm = s;
  dgemm = d;
  cgemm = c;
  sgemv = v;
}

static int64_t calls;

/* How many products came here: proof that MLX calls us and not its own BLAS. */
int64_t shim_calls(void) { return calls; }

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
  calls++;
  if (order == ROW_MAJOR && trans_a == NO_TRANS && m <= FEW_ROWS) {
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
