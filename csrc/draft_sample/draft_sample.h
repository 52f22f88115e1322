// What a drafter proposes at one row: its likeliest tokens, or draws without replacement from
// q = softmax(logits / temperature).
//
// Weights are tree_verify's (its header has the rule): exp((value - greatest) / temperature) in
// fp32, truncated to multiples of 2^-kWeightBits where they are summed. q of an id is its weight
// times 2^kWeightBits / (the sum), both fp32, and 0 where the truncated weight is; it is drawn from
// in multiples of 2^-kWeightBits, just as tree_verify will read it. So no order of addition shows:
// every backend writes the same q, and draws the same tokens.
#pragma once

#include "tree_verify/tree_verify.h"

namespace spec_kernels {

constexpr int64_t kMaxDrafts = 1024;
// Of the greatest; what is below is truncated to nothing.
constexpr float kLeastWeight = 9.094947017729282e-13f;  // 2^-kWeightBits

// What brings weights of this sum, in multiples of 2^-kWeightBits, to 1.
SK_HOST_DEVICE inline float inverse_total(uint64_t total) {
  return static_cast<float>(static_cast<double>(uint64_t{1} << kWeightBits) /
                            static_cast<double>(total));
}

// floor(coin * total / 2^32), for total < 2^47: the draw is the first id whose cumulative weight
// exceeds it.
SK_HOST_DEVICE inline uint64_t draft_below(uint32_t coin, uint64_t total) {
  return (total * (coin >> 16) + ((total * (coin & 0xFFFFu)) >> 16)) >> 16;
}

// ---- CPU row kernels.

// The weights of the values in blocks [first_block, last_block), and by block their sums.
SK_DECLARE_KERNEL(void drafter_weights(const Weights& w, int64_t first_block, int64_t last_block,
                                       float* weights, uint64_t* sums))
// Makes q of weights, and the sums those of its weights.
SK_DECLARE_KERNEL(void drafter_probs(float inverse_total, int64_t first_block, int64_t last_block,
                                     float* weights, uint64_t* sums))
// The first id of the block whose cumulative weight exceeds `below`.
SK_DECLARE_KERNEL(int64_t find_draft(const float* q, int64_t block, uint64_t below))

}  // namespace spec_kernels
