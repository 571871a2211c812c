// Stands in for CUDA around a kernel that is compiled as C++: each thread of a block is a thread of this process.
#include <barrier>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

struct Index {
  unsigned x, y, z;
};
static thread_local Index threadIdx;
static Index blockIdx, gridDim;
static std::barrier<>* block;
static std::vector<std::barrier<>*> warps;
static float exchanged[32][32];

static float __shfl_xor_sync(unsigned, float x, int far) {
  float* slots = exchanged[threadIdx.y];
  slots[threadIdx.x] = x;
  warps[threadIdx.y]->arrive_and_wait();
  const float other = slots[threadIdx.x ^ far];
  warps[threadIdx.y]->arrive_and_wait();
  return other;
}

#define __shared__ static
#define __syncthreads() block->arrive_and_wait()

template <typename F> void run(Index grid, unsigned across, unsigned down, const F& body) {
  gridDim = grid;
  std::barrier<> all(across * down);
  block = &all;
  warps.clear();
  for (unsigned y = 0; y < down; ++y) warps.push_back(new std::barrier<>(across));
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
        std::vector<std::thread> threads;
        for (unsigned y = 0; y < down; ++y)
          for (unsigned x = 0; x < across; ++x)
            threads.emplace_back([&body, x, y] {
              threadIdx = {x, y, 0};
              body();
            });
        for (auto& each : threads) each.join();
      }
}
