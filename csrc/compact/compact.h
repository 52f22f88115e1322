// Moves what belongs to the accepted path to the front, bytewise: for i <= num_accepted, row
// accept_index[i] to row i.
//
// In a cache [P, page, ...] row n of a request stands at logical position context_len + n: slot
// (position % page) of page block_tables[b, position / page]. Nodes increase along a path, hence
// accept_index[i] >= i: every row moves towards the front, and ascending order never overwrites a
// row that is still to be read.
#pragma once

#include <cstdint>

#include "common/check.h"
#include "common/host_device.h"

namespace spec_kernels {

// One tensor whose rows move: [P, page, ...] or [B, N, ...], contiguous beyond dimension 1.
struct MovedRows {
  char* data;
  int64_t outer, inner;                // sizes of dimensions 0 and 1
  int64_t outer_stride, inner_stride;  // bytes
  int64_t row_bytes;
};

// What is read to know the moves; strides in elements.
struct CompactIndices {
  IntView paths, counts, lengths, tables;
  int64_t batch, num_columns;  // columns of paths
  int64_t num_table_columns;
  int64_t path_row, path_column, count_stride, length_stride, table_row, table_column;

  SK_HOST_DEVICE int64_t length(int64_t b) const { return lengths[b * length_stride]; }
  SK_HOST_DEVICE int64_t count(int64_t b) const { return counts[b * count_stride]; }
  SK_HOST_DEVICE int64_t node(int64_t b, int64_t i) const {
    return paths[b * path_row + i * path_column];
  }
  // Unsigned, so that an absurd length wraps to a negative position, which is in no table.
  SK_HOST_DEVICE int64_t position(int64_t b, int64_t node) const {
    return static_cast<int64_t>(static_cast<uint64_t>(length(b)) + static_cast<uint64_t>(node));
  }
  SK_HOST_DEVICE bool in_table(int64_t position, int64_t page_size) const {
    return position >= 0 && position / page_size < num_table_columns;
  }
  SK_HOST_DEVICE int64_t page(int64_t b, int64_t position, int64_t page_size) const {
    return tables[b * table_row + position / page_size * table_column];
  }
};

}  // namespace spec_kernels
