// Combines S partial attention results over disjoint keys, in the order 0, 1, 2, ..., as (greatest
// LSE so far, sum of exp relative to it, weighted values); one division and one rounding at the
// end. A part whose LSE is -inf is not looked at. A row's bits depend on nothing but its parts.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace spec_kernels {

constexpr int64_t kMaxParts = 1024;

struct MergeStatesArgs {
  const void* outs;   // [S, B, N, H, D], last dimension adjacent
  const float* lses;  // [S, B, N, H]
  void* out;          // [B, N, H, D], last dimension adjacent
  float* lse;         // [B, N, H]
  int64_t outs_stride[4], lses_stride[4], out_stride[3], lse_stride[3];
  int64_t num_parts, num_rows, num_heads, dim;  // num_rows: N
  Float dtype;
};

// Rows [begin, end) of the B * N * H.
SK_DECLARE_KERNEL(void merge_states_rows(const MergeStatesArgs& args, int64_t begin, int64_t end))

}  // namespace spec_kernels
