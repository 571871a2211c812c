// Stands in for CUDA and Metal around a kernel that is compiled as C++: the 32 lanes of a warp take turns, each on a
// stack of its own, from one exchange between lanes to the next.
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <ucontext.h>

using Shape = std::array<int32_t, 10>;
using Strides = std::array<int64_t, 10>;
using ushort = unsigned short;
namespace metal {
using std::exp, std::fma;
}

struct bfloat {
  uint16_t bits;
  bfloat() = default;
  explicit bfloat(float x) {
    uint32_t word;
    std::memcpy(&word, &x, 4);
    bits = (word + 0x7fff + (word >> 16 & 1)) >> 16;
  }
  operator float() const {
    uint32_t word = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &word, 4);
    return x;
  }
};

struct Index {
  unsigned x, y, z;
};
static Index threadIdx, blockIdx, blockDim, thread_position_in_grid;
static unsigned thread_index_in_simdgroup;

static ucontext_t scheduler, contexts[32];
static char stacks[32][1 << 15];
static float exchanged[2][32];
static int rounds[32], current;
static const std::function<void()>* body;

static float __shfl_xor_sync(unsigned, float x, int far) {
  const int lane = current;
  float* slots = exchanged[rounds[lane]++ % 2];
  slots[lane] = x;
  swapcontext(&contexts[lane], &scheduler);
  return slots[lane ^ far];
}

static float simd_shuffle_xor(float x, ushort far) {
  return __shfl_xor_sync(0, x, far);
}

static void enter() {
  const int lane = current;
  (*body)();
  rounds[lane] = -1;
}

// Runs one warp. Returns false if its lanes do not exchange the same number of times.
static bool warp() {
  for (int lane = 0; lane < 32; ++lane) {
    rounds[lane] = 0;
    getcontext(&contexts[lane]);
    contexts[lane].uc_stack.ss_sp = stacks[lane];
    contexts[lane].uc_stack.ss_size = sizeof(stacks[lane]);
    contexts[lane].uc_link = &scheduler;
    makecontext(&contexts[lane], enter, 0);
  }
  while (rounds[0] >= 0) {
    for (current = 0; current < 32; ++current) {
      threadIdx.x = thread_position_in_grid.x = thread_index_in_simdgroup = current;
      swapcontext(&scheduler, &contexts[current]);
      if (current && rounds[current] != rounds[0]) return false;
    }
  }
  return true;
}

// Runs a grid of 32 x y x z threads in groups of 32 x `across`: whole groups if `whole`, as CUDA does.
static int run(const std::function<void()>& kernel, const int* grid, int across, bool whole) {
  body = &kernel;
  blockDim = {32, unsigned(across), 1};
  const int most = whole ? (grid[1] + across - 1) / across * across : grid[1];
  for (int z = 0; z < grid[2]; ++z) {
    for (int y = 0; y < most; ++y) {
      thread_position_in_grid = {0, unsigned(y), unsigned(z)};
      blockIdx = {0, unsigned(y / across), unsigned(z)};
      threadIdx.y = y % across;
      if (!warp()) return 1;
    }
  }
  return 0;
}
