#include "draft_sample/draft_sample.h"
#include "tree_verify/tree_verify_simd.h"

namespace spec_kernels {
namespace SK_ISA {

void drafter_probs(const Weights& w, float inverse_total, int64_t first_block, int64_t last_block,
                   float* q, uint64_t* sums) {
  for (int64_t block = first_block; block < last_block; ++block) {
    U32x16 high = {};
    U32x16 low = {};
    // Per lane at most 8 * 2^24 and 8 * 2^16; over lanes 2^31 at most.
    for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += kLanes) {
      const F32x16 weight = exp_weight(log_weight(w, load(w.values + i)));
      const I32x16 counts = greater_equal(weight, splat(kLeastWeight));
      const F32x16 own = (F32x16)((I32x16)(weight * inverse_total) & counts);
      store(q + i, own);
      const Fixed fixed = to_fixed(own);
      high += fixed.high;
      low += fixed.low;
    }
    sums[block] = (uint64_t{sum(high)} << 16) + sum(low);
  }
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
