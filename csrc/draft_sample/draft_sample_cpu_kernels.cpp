#include "draft_sample/draft_sample.h"
#include "tree_verify/tree_verify_simd.h"

namespace spec_kernels {
namespace SK_ISA {

namespace {

// Stores f(i) of sixteen elements at a time, and by block the sums of what that is truncated to.
template <class F>
SK_INLINE void store_and_sum(int64_t first_block, int64_t last_block, float* out, uint64_t* sums,
                             const F& f) {
  for (int64_t block = first_block; block < last_block; ++block) {
    U32x16 high = {};
    U32x16 low = {};
    // Per lane at most 8 * 2^24 and 8 * 2^16; over lanes 2^31 at most.
    for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += kLanes) {
      const F32x16 v = f(i);
      store(out + i, v);
      const Fixed fixed = to_fixed(v);
      high += fixed.high;
      low += fixed.low;
    }
    sums[block] = (uint64_t{sum(high)} << 16) + sum(low);
  }
}

}  // namespace

void drafter_weights(const Weights& w, int64_t first_block, int64_t last_block, float* weights,
                     uint64_t* sums) {
  store_and_sum(first_block, last_block, weights, sums,
                [&](int64_t i) { return exp_weight(log_weight(w, load(w.values + i))); });
}

void drafter_probs(float inverse_total, int64_t first_block, int64_t last_block, float* weights,
                   uint64_t* sums) {
  store_and_sum(first_block, last_block, weights, sums, [&](int64_t i) {
    const F32x16 weight = load(weights + i);
    return (F32x16)((I32x16)(weight * inverse_total) & greater_equal(weight, splat(kLeastWeight)));
  });
}

int64_t find_draft(const float* q, int64_t block, uint64_t below) {
  uint64_t cumulative = 0;
  for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += kLanes) {
    const Fixed fixed = to_fixed(load(q + i));
    for (int j = 0; j < kLanes; ++j) {
      cumulative += fixed_lane(fixed, j);
      if (cumulative > below) return i + j;
    }
  }
  return -1;  // not reached: the caller picked the block whose sum exceeds `below`
}

}  // namespace SK_ISA
}  // namespace spec_kernels
