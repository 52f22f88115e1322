// The best N - 1 candidates of each request's pool, linked under the root into a static-shaped
// tree.
//
// Highest score first, ties to the lower pool index; nodes are laid out in ascending pool index, so
// parents precede children. A malformed or missing parent leaves its node unlinked: in no child
// list, parent -1, and only the root and itself visible. Requests never see each other, so the harm
// of a bad pool ends at its own tree.
#pragma once

#include <cstdint>

namespace spec_kernels {

constexpr int64_t kMaxNodes = 1024;

// Twins of TreeStatus in spec_kernels/ops/tree_build/reference.py.
enum TreeStatus : int32_t {
  kBadParent = 1,      // a parent slot below -1, or not below the candidate's own index
  kMissingParent = 2,  // a parent that is absent from the pool, or scored too low to be kept
};

constexpr int64_t tree_words(int64_t num_nodes) { return (num_nodes + 31) / 32; }

}  // namespace spec_kernels
