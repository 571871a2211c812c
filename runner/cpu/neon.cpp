#ifdef __aarch64__ /* where these vectors are always there */
#define WIDTH 4
#define TABLE kernels_neon
#include "simd.h"
#endif
