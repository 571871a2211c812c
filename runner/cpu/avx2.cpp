#ifdef __x86_64__
#pragma GCC target("avx2,fma,f16c")
#define WIDTH 8
#define TABLE kernels_avx2
#define INTEGERS
#include "simd.h"
#endif
