// What the CUDA kernels of tree_verify and its ops on given coins share: sums over a block, and the
// search for the element that a coin picks.
#pragma once

#include <cstdint>

#include "common/device.cuh"

namespace spec_kernels {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 512;
constexpr int kMaxWarps = kMaxThreads / kWarp;

struct BlockSums {
  uint64_t partial[kMaxWarps];
  uint64_t segment[kMaxWarps];  // of each warp's share of the elements
};

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x) / kWarp; }
__device__ inline int num_warps() { return static_cast<int>(blockDim.x) / kWarp; }
__device__ inline int divide_up(int a, int b) { return (a + b - 1) / b; }

__device__ inline uint64_t warp_sum(uint64_t v) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) v += __shfl_xor_sync(0xffffffffu, v, mask);
  return v;
}
__device__ inline uint64_t warp_max(uint64_t v) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, v, mask);
    v = other > v ? other : v;
  }
  return v;
}

// Every function below that all threads of a block enter together starts with a barrier before it
// writes to shared memory, so what one leaves there may be read until the next is entered.

__device__ inline uint64_t block_max(BlockSums& s, uint64_t v) {
  v = warp_max(v);
  __syncthreads();
  if (lane_id() == 0) s.partial[warp_id()] = v;
  __syncthreads();
  return warp_max(lane_id() < num_warps() ? s.partial[lane_id()] : 0);
}

__device__ inline uint64_t block_sum(BlockSums& s, uint64_t v) {
  v = warp_sum(v);
  __syncthreads();
  if (lane_id() == 0) s.partial[warp_id()] = v;
  __syncthreads();
  return warp_sum(lane_id() < num_warps() ? s.partial[lane_id()] : 0);
}

__device__ inline bool exceeds(uint64_t cumulative, uint64_t below) {
  return cumulative > below || (cumulative == below && mutant("tree_verify_closed"));
}

// The lane whose share of the cumulative sum over lanes exceeds `below` first; what stands before
// it is taken off `below`. The sum over all lanes must exceed it.
__device__ inline int pick_lane(uint64_t v, uint64_t& below) {
  uint64_t inclusive = v;
  for (int delta = 1; delta < kWarp; delta *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffffu, inclusive, delta);
    if (lane_id() >= delta) inclusive += other;
  }
  const unsigned hits = __ballot_sync(0xffffffffu, exceeds(inclusive, below));
  const int found = __ffs(static_cast<int>(hits)) - 1;
  below -= __shfl_sync(0xffffffffu, inclusive - v, found);
  return found;
}

// Elements come in tiles, some to a lane, in the order of lanes; a warp takes the tiles
// [first, last).
struct Part {
  int first, last;
};

// This warp's share of the tiles [first, first + n): warps have them in order.
__device__ __forceinline__ Part own_share(int first, int n) {
  const int each = divide_up(n, num_warps());
  const int begin = first + warp_id() * each;
  return {min(begin, first + n), min(begin + each, first + n)};
}

// Sum of lane_sum(part) over n tiles; the sums of the warps stay for find_tile().
template <class LaneSum>
__device__ __forceinline__ uint64_t sum_tiles(BlockSums& s, int n, const LaneSum& lane_sum) {
  const uint64_t own = warp_sum(lane_sum(own_share(0, n)));
  __syncthreads();
  if (lane_id() == 0) s.segment[warp_id()] = own;
  if (!mutant("tree_verify_barrier")) __syncthreads();
  return warp_sum(lane_id() < num_warps() ? s.segment[lane_id()] : 0);
}

struct Place {
  int tile, lane;
};

// Where the cumulative sum exceeds `below` first, after sum_tiles(); what stands before that lane
// is taken off `below`. Needs two warps.
template <class LaneSum>
__device__ __forceinline__ Place find_tile(BlockSums& s, int n, uint64_t& below,
                                           const LaneSum& lane_sum) {
  int size = divide_up(n, num_warps());
  int first = pick_lane(lane_id() < num_warps() ? s.segment[lane_id()] : 0, below) * size;
  int last = min(first + size, n);
#pragma unroll 1
  for (;;) {
    const bool single = last - first == 1;
    uint64_t own = lane_sum(single ? Part{first, last} : own_share(first, last - first));
    if (single) return {first, pick_lane(own, below)};
    own = warp_sum(own);
    __syncthreads();
    if (lane_id() == 0) s.partial[warp_id()] = own;
    __syncthreads();
    size = divide_up(last - first, num_warps());
    first += pick_lane(lane_id() < num_warps() ? s.partial[lane_id()] : 0, below) * size;
    last = min(first + size, last);
  }
}

}  // namespace spec_kernels
