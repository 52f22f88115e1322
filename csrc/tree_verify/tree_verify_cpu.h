// The walk on the CPU, for `tree_verify` and for what begins with it; and rows of values in working
// memory, for whoever weighs them by the same rule.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "tree_verify/tree_verify_args.h"

namespace spec_kernels {

// Raises before anything is written where a parameter is out of range.
void tree_verify_on_cpu(const char* op, const TreeVerifyArgs& args);

// A row is cut into chunks of fixed size for threads; a multiple of kBlock.
constexpr int64_t kChunk = 32768;
constexpr int64_t kBlocksPerChunk = kChunk / kBlock;

// Calls f(chunk, begin, end).
template <class F>
void for_chunks(int64_t size, int64_t chunk, const F& f) {
  torch::stable::parallel_for(0, (size + chunk - 1) / chunk, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) f(c, c * chunk, std::min(size, (c + 1) * chunk));
  });
}

// Working memory of one thread, kept from call to call: a row is too large to be mapped anew each
// time.
struct RowScratch {
  std::vector<float> values, block_max, sorted_max;
  std::vector<uint64_t> sums;  // of weights, by block
  std::vector<Candidate> candidates;

  int64_t num_blocks() const { return static_cast<int64_t>(block_max.size()); }
};

inline bool better(const Candidate& x, const Candidate& y) {
  return x.value != y.value ? x.value > y.value : x.id < y.id;
}

// Fills values and block_max; nothing is cut off, and the temperature is not set.
Weights read_row(const Row& row, RowScratch& scratch);

// Fills sums; returns their sum.
uint64_t sum_weights(const Weights& w, RowScratch& scratch);

// Collects at least the `count` best values (all finite ones if there are fewer) in candidates, in
// no order. Returns false when every value > -inf was collected.
bool gather_best(int64_t count, RowScratch& scratch);

}  // namespace spec_kernels
