// Moves what belongs to the accepted path to the front, bytewise: for i <= num_accepted, row
// accept_index[i] to row i.
//
// In a cache [P, page, ...] row n of a request stands at logical position context_len + n: slot
// (position % page) of page block_tables[b, position / page]. Nodes increase along a path, hence
// accept_index[i] >= i: every row moves towards the front, and ascending order never overwrites a
// row that is still to be read.
#pragma once

#include <cstdint>

namespace spec_kernels {

// One tensor whose rows move: [P, page, ...] or [B, N, ...], contiguous beyond dimension 1.
struct MovedRows {
  char* data;
  int64_t outer, inner;                // sizes of dimensions 0 and 1
  int64_t outer_stride, inner_stride;  // bytes
  int64_t row_bytes;
};

}  // namespace spec_kernels
