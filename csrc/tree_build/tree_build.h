// The best N - 1 candidates of each request's pool, linked under the root into a static-shaped
// tree.
//
// Highest score first, ties to the lower pool index; nodes are laid out in ascending pool index, so
// parents precede children. A malformed or missing parent leaves its node unlinked: in no child
// list, parent -1, and only the root and itself visible. Requests never see each other, so the harm
// of a bad pool ends at its own tree.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/check.h"
#include "common/host_device.h"
#include "common/tree.h"

namespace spec_kernels {

// Twins of TreeStatus in spec_kernels/ops/tree_build/reference.py.
enum TreeStatus : int32_t {
  kBadParent = 1,      // a parent slot below -1, or not below the candidate's own index
  kMissingParent = 2,  // a parent that is absent from the pool, or scored too low to be kept
  kBadToken = 4,       // an id beyond the dtype of tokens: absent (CUDA; on CPU an error)
};

constexpr int64_t tree_words(int64_t num_nodes) { return (num_nodes + 31) / 32; }

// A score as an integer of the same order; -inf and NaN, which are absent, give 0 and nothing else
// does.
SK_HOST_DEVICE inline uint32_t score_key(float score) {
  if (!(score > -INFINITY) && !mutant("tree_build_absent")) return 0;
  score += 0.0f;  // -0 and 0 tie
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof(bits));
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// One parent for every node, and none that comes later: walks up end.
SK_HOST_DEVICE inline bool parent_slot_is_sound(int64_t parent_slot, int64_t slot) {
  return parent_slot >= -1 && (parent_slot < slot || mutant("tree_build_any_parent"));
}

// The candidates of every request; strides in elements.
struct CandidatePool {
  const float* scores;
  IntView candidates, parent_slots, root_tokens;
  int64_t score_stride[2], candidate_stride[2], slot_stride[2], root_stride;
  int64_t size;

  SK_HOST_DEVICE float score(int64_t b, int64_t i) const {
    return scores[b * score_stride[0] + i * score_stride[1]];
  }
  SK_HOST_DEVICE int64_t candidate(int64_t b, int64_t i) const {
    return candidates[b * candidate_stride[0] + i * candidate_stride[1]];
  }
  SK_HOST_DEVICE int64_t parent_slot(int64_t b, int64_t i) const {
    return parent_slots[b * slot_stride[0] + i * slot_stride[1]];
  }
  SK_HOST_DEVICE int64_t root(int64_t b) const { return root_tokens[b * root_stride]; }
};

// What is written, all of it contiguous.
struct TreeOutputs {
  MutableIntView tokens, parents, depths, first_child, next_sibling, pool_index, status;
  uint32_t* ancestors;
  int64_t num_nodes, num_words;
};

}  // namespace spec_kernels
