// The walk down a draft tree along the target's own choices, and the rule by which the target
// chooses.
//
// The rule is written so that every backend gets the same bits whatever order it adds in. Values
// are logits + bias in fp32; NaN and what is not allowed count as -inf. Weights are exp((value -
// greatest) / temperature) in fp32, by products and sums that are rounded one by one (no fused
// multiply-add), truncated to multiples of 2^-kWeightBits: sums of integers have no order. The
// token is the first id whose cumulative weight exceeds coin * total; the comparison is exact and
// half-open, so weight zero is never chosen. The coin depends on seed and absolute position alone,
// so plain decoding and any tree choose the same token.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

#if defined(__CUDACC__)
#define SK_HOST_DEVICE __host__ __device__
#else
#define SK_HOST_DEVICE
#endif

namespace spec_kernels {

// Twins of VerifyStatus in spec_kernels/ops/tree_verify/reference.py.
enum VerifyStatus : int32_t {
  kNoToken = 1,  // a visited row is all NaN, -inf or masked: id 0 stands in, the walk ends
  kBadLink =
      2,  // a link on the walk points outside the tree, or a child does not come after its parent
  kSiblingCycle = 4,  // a list of siblings has more entries than the tree has nodes
  kBadParameter = 8,  // a sampling parameter out of range; on CPU it raises instead
};

// Third word of the counter. Twins of Purpose in the same file; the others are reserved for
// draft-probability acceptance.
enum Purpose : uint32_t { kSample = 0, kAccept = 1, kResidual = 2, kDraft = 3 };

constexpr int64_t kMaxNodes = 1024;
constexpr int kWeightBits = 40;
constexpr int kCoinBits = 24;
// kMaxVocab weights of 2^kWeightBits stay below 2^63.
constexpr int64_t kMaxVocab = int64_t{1} << 22;

struct Philox {
  uint32_t word[4];
};

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
SK_HOST_DEVICE inline Philox philox4x32(Philox counter, uint32_t key0, uint32_t key1) {
  uint32_t* c = counter.word;
  for (int round = 0; round < 10; ++round) {
    const uint64_t left = uint64_t{0xD2511F53u} * c[0];
    const uint64_t right = uint64_t{0xCD9E8D57u} * c[2];
    c[0] = static_cast<uint32_t>(right >> 32) ^ c[1] ^ key0;
    c[1] = static_cast<uint32_t>(right);
    c[2] = static_cast<uint32_t>(left >> 32) ^ c[3] ^ key1;
    c[3] = static_cast<uint32_t>(left);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// kCoinBits random bits: the coin is this over 2^kCoinBits, in [0, 1).
SK_HOST_DEVICE inline uint32_t coin_bits(uint64_t seed, uint64_t position, Purpose purpose) {
  const Philox counter = {
      {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), purpose, 0u}};
  const uint32_t word =
      philox4x32(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)).word[0];
  return word >> (32 - kCoinBits);
}

// floor(coin * total): for integers, cumulative > coin * total iff cumulative > this. Split to stay
// within 64 bits.
SK_HOST_DEVICE inline uint64_t coin_times(uint32_t bits, uint64_t total) {
  constexpr uint64_t kLow = (uint64_t{1} << kCoinBits) - 1;
  return bits * (total >> kCoinBits) + ((bits * (total & kLow)) >> kCoinBits);
}

struct ChildSearch {
  int64_t child;  // -1 = none
  int32_t status;
};

// The first child of `node` in list order that carries `token`. Bounded by num_nodes steps whatever
// the links hold; no id is used before it is known to lie in (node, num_nodes). Children after
// their parent keep accept_index increasing, and so any walk finite.
template <class Tokens, class FirstChild, class NextSibling>
SK_HOST_DEVICE inline ChildSearch find_child(int64_t node, int64_t token, int64_t num_nodes,
                                             const Tokens& tokens, const FirstChild& first_child,
                                             const NextSibling& next_sibling) {
  int64_t child = first_child(node);
  for (int64_t step = 0; step < num_nodes; ++step) {
    if (child == -1) return {-1, 0};
    if (child <= node || child >= num_nodes) return {-1, kBadLink};
    if (tokens(child) == token) return {child, 0};
    child = next_sibling(child);
  }
  return {-1, kSiblingCycle};
}

// ---- CPU row kernels. A row is cut into blocks, so that selection can skip whole blocks by their
// greatest value.

constexpr int64_t kBlock = 128;
// Bins by the logarithm of the relative probability, 0 down to -30: a first sieve for top-p.
constexpr int kBinsPerNat = 8;
constexpr int kNumBins = 30 * kBinsPerNat + 1;

struct Row {
  const void* logits;
  const float* bias;        // or null
  const uint32_t* allowed;  // or null
  int64_t vocab;
  Float dtype;
};

struct Best {
  float value;  // -inf: nothing to choose
  int64_t id;
};

struct Candidate {
  uint64_t weight;
  float value;
  int32_t id;
};

// The values of a row, padded with -inf to whole blocks, and what turns them into weights. Kept are
// values above cut.value, those equal to it up to cut.id, and of these the weights >= min_p.
struct Weights {
  const float* values;
  const float* block_max;
  float greatest;
  float inverse_temperature;
  float min_p;
  Best cut;
};

SK_DECLARE_KERNEL(Best row_argmax(const Row& row, int64_t begin, int64_t end))
SK_DECLARE_KERNEL(void row_values(const Row& row, int64_t first_block, int64_t last_block,
                                  float* values, float* block_max))
SK_DECLARE_KERNEL(void block_weights(const Weights& w, int64_t first_block, int64_t last_block,
                                     uint64_t* sums))
// Adds the weight of every value to its bin (no cut, no min_p).
SK_DECLARE_KERNEL(void weight_histogram(const Weights& w, int64_t first_block, int64_t last_block,
                                        uint64_t* mass))
// Appends the block's values of one bin; at most kBlock.
SK_DECLARE_KERNEL(int64_t gather_bin(const Weights& w, int64_t block, int32_t bin, Candidate* out))
SK_DECLARE_KERNEL(int64_t find_in_block(const Weights& w, int64_t block, uint64_t below))
SK_DECLARE_KERNEL(void candidate_weights(const Weights& w, Candidate* candidates,
                                         int64_t num_candidates))

}  // namespace spec_kernels
