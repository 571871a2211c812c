// Stands in for CUDA and Metal around a kernel that is compiled as C++: the threads of a block take turns, each on a
// stack of its own, from one exchange between the 32 lanes of a warp, or one barrier, to the next.
#include <algorithm>
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
static Index threadIdx, blockIdx, blockDim, gridDim, thread_position_in_grid;
static unsigned thread_index_in_simdgroup;

constexpr int MOST = 256;
static ucontext_t scheduler, contexts[MOST];
static char stacks[MOST][1 << 15];
static float exchanged[2][MOST];
static int rounds[MOST], waiting, phase, current;
static const std::function<void()>* body;

#define __shared__ static

static void yield() {
  swapcontext(&contexts[current], &scheduler);
}

static float __shfl_xor_sync(unsigned, float x, int far) {
  const int lane = current;
  float* slots = exchanged[rounds[lane]++ % 2];
  slots[lane] = x;
  yield();
  return slots[lane ^ far];
}

static float simd_shuffle_xor(float x, ushort far) {
  return __shfl_xor_sync(0, x, far);
}

static void __syncthreads() {
  const int before = phase;
  ++waiting;
  while (phase == before) yield();
}

static void enter() {
  const int thread = current;
  (*body)();
  rounds[thread] = -1;
}

// Runs one block. Returns false if the lanes of a warp do not exchange the same number of times, or if only some threads
// come to a barrier.
static bool block(int across, int down) {
  const int threads = across * down;
  waiting = 0;
  for (int thread = 0; thread < threads; ++thread) {
    rounds[thread] = 0;
    getcontext(&contexts[thread]);
    contexts[thread].uc_stack.ss_sp = stacks[thread];
    contexts[thread].uc_stack.ss_size = sizeof(stacks[thread]);
    contexts[thread].uc_link = &scheduler;
    makecontext(&contexts[thread], enter, 0);
  }
  for (int running = threads; running; running = threads - std::count(rounds, rounds + threads, -1)) {
    if (waiting && running < threads) return false;
    if (waiting == threads) waiting = 0, ++phase;
    const Index corner = thread_position_in_grid;
    for (current = 0; current < threads; ++current) {
      if (rounds[current] < 0) continue;
      threadIdx = {unsigned(current % across), unsigned(current / across), 0};
      thread_position_in_grid = {corner.x + threadIdx.x, corner.y + threadIdx.y, corner.z};
      thread_index_in_simdgroup = current % 32;
      swapcontext(&scheduler, &contexts[current]);
      if (current % 32 && rounds[current] != rounds[current - 1]) return false;
    }
    thread_position_in_grid = corner;
  }
  return true;
}

// Runs a grid of threads in blocks of `across` x `down`: whole blocks if `whole`, as CUDA does.
static int run(const std::function<void()>& kernel, const int* grid, int across, int down, bool whole) {
  if (across * down > MOST) return 1;
  body = &kernel;
  const unsigned wide = across, high = down;
  blockDim = {wide, high, 1};
  gridDim = {(grid[0] + wide - 1) / wide, (grid[1] + high - 1) / high, unsigned(grid[2])};
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        thread_position_in_grid = {blockIdx.x * wide, blockIdx.y * high, blockIdx.z};
        const int rows = whole ? down : std::min(down, grid[1] - int(thread_position_in_grid.y));
        if (!block(across, rows)) return 1;
      }
  return 0;
}
