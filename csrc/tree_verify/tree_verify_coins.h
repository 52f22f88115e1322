// The walk down a draft tree on what the caller brings: the target's choices, or its probabilities
// and coins to sample by.
//
// Nodes are named by their slot in flat arrays [M]; a node whose slot is outside is no node. Only
// what the walk reaches is written. Every decision is one fp32 sum, division and comparison in list
// order, and the last token is drawn by integer weights, so every backend gets the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "tree_verify/tree_verify.h"

namespace spec_kernels {

constexpr float kMaxCoin = 1.0f - 1.0f / (1 << kCoinBits);
constexpr float kMinThreshold = 1e-9f;
constexpr float kMaxFloat = 3.402823466e38f;

// Coins within [0, 1): what is above counts as the greatest below 1; NaN counts as 0.
SK_HOST_DEVICE inline float clamped_coin(float coin) {
  if (!(coin > 0.0f)) return 0.0f;
  return coin < kMaxCoin ? coin : kMaxCoin;
}

// What is not above 0, NaN included, counts as 0; infinity as the greatest float.
SK_HOST_DEVICE inline float positive(float x) {
  if (!(x > 0.0f)) return 0.0f;
  return x < kMaxFloat ? x : kMaxFloat;
}

SK_HOST_DEVICE inline uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

// The biased exponent by which a row with this greatest value is weighed; subnormals share one.
SK_HOST_DEVICE inline int32_t weight_exponent(float greatest) {
  const int32_t exponent = static_cast<int32_t>(float_bits(greatest) >> 23);
  return exponent > 1 ? exponent : 1;
}

// x >= 0 in multiples, truncated, of 2^-(kWeightBits - 1) of the power of two that `top` names: at
// most 2^kWeightBits for x up to the greatest, whose weight is never 0.
SK_HOST_DEVICE inline uint64_t residual_weight(float x, int32_t top) {
  const uint32_t bits = float_bits(x);
  const int32_t biased = static_cast<int32_t>(bits >> 23);
  const uint64_t mantissa = (bits & 0x7FFFFFu) | (biased ? 0x800000u : 0u);
  const int32_t shift = kWeightBits - 24 + (biased ? biased : 1) - top;
  if (shift >= 0) return mantissa << shift;
  return shift > -24 ? mantissa >> -shift : 0;
}

// Links of one request that lead only to nodes with a slot; Children takes the rest for bad links.
template <class Links, class Slots>
struct SlottedLinks {
  const Links& links;
  const Slots& slots;
  int64_t num_nodes, num_slots;

  SK_HOST_DEVICE int64_t operator()(int64_t node) const {
    const int64_t next = links(node);
    if (next < 0 || next >= num_nodes) return next;
    const int64_t slot = slots(next);
    return slot >= 0 && slot < num_slots ? next : num_nodes;
  }
};

struct Thresholds {
  float single, accumulated;
};

// The first child whose sum of probabilities so far, over `accumulated`, exceeds the coin, or whose
// own reaches `single`; never one of probability 0. `probability` is asked for ids in [0, vocab).
template <class Tokens, class Probability, class FirstChild, class NextSibling>
SK_HOST_DEVICE SK_FORCE_INLINE ChildSearch
accept_by_coin(int64_t node, int64_t num_nodes, int64_t vocab, float coin,
               const Thresholds& thresholds, const Tokens& tokens, const Probability& probability,
               const FirstChild& first_child, const NextSibling& next_sibling) {
  Children<FirstChild, NextSibling> it(node, num_nodes, first_child, next_sibling);
  float sum = 0.0f;
  for (; !it.done(); it.next()) {
    const int64_t token = tokens(it.child());
    const float p = token >= 0 && token < vocab ? positive(probability(token)) : 0.0f;
    sum += p;
    const float limit = sum / thresholds.accumulated;
    if (p > 0.0f && (coin < limit || (coin == limit && mutant("tree_verify_coins_closed")) ||
                     p >= thresholds.single)) {
      return {it.child(), 0};
    }
  }
  return {-1, it.status()};
}

// The kCoinBits bits of a coin.
SK_HOST_DEVICE inline uint32_t bits_of_coin(float coin) {
  return static_cast<uint32_t>(clamped_coin(coin) * (1 << kCoinBits));
}

struct WalkEnd {
  int64_t node, depth;
  int32_t status;
  bool full;  // the path has no more room: the children of `node` were not looked at
};

// Walks from the root as long as `decide(node)` finds a child; `accept(depth, child)` is told of
// each.
template <class Decide, class Accept>
SK_HOST_DEVICE SK_FORCE_INLINE WalkEnd walk_path(int64_t room, const Decide& decide,
                                                 const Accept& accept) {
  int64_t node = 0;
  int64_t depth = 0;
  while (depth + 1 < room) {
    const ChildSearch found = decide(node);
    if (found.child < 0) return {node, depth, found.status, false};
    ++depth;
    accept(depth, found.child);
    node = found.child;
  }
  return {node, depth, 0, true};
}

}  // namespace spec_kernels
