#ifdef __x86_64__
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")
#define WIDTH 16
#define TABLE kernels_avx512
#define INTEGERS
#include "simd.h"
#endif
