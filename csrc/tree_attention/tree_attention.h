// Attention of tree rows over a paged cache, in positions rather than cache slots.
//
// Of a context that ranks share, everything below concerns the part in this cache: its prefix
// keys stand one after another, its local positions, and that is what a position means here.
//
// A row's path is its set ancestor bits in ascending order; the k-th path key stands at position
// context + k, and a prefix key at its own index, so every row sees one contiguous range of
// positions [first, last]. All arithmetic is laid out by absolute position: leaves of kLeafKeys
// keys, each with its own maximum, sum and weighted values, merged by log-sum-exp along the aligned
// binary tree over leaf numbers (leaf 2i with 2i+1, and so on upwards). A leaf that a row does not
// see is the exact identity of that merge, and a key that it does not see adds exact zeros. So a
// row's bits are a function of its query and of the keys on its path by position, and of nothing
// else: not of the division between prefix and tree, the other rows, the batch, the jobs that the
// work was cut into, or the threads.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace spec_kernels {

constexpr int64_t kKeyBlock = 64;
constexpr int64_t kFirstSplits = 32;
constexpr int64_t kMaxSplits = 128;

// Twin of spec_kernels/ops/tree_attention/splits.py: the least kKeyBlock * 2^k with which
// kFirstSplits * 2^k splits, but at most kMaxSplits, suffice.
static inline int64_t attention_split_size(int64_t context_len) {
  int64_t size = kKeyBlock, most = kFirstSplits;
  while (size <= (context_len - 1) / most) {
    size *= 2;
    if (most < kMaxSplits) most *= 2;
  }
  return size;
}

static inline int64_t attention_splits(int64_t context_len) {
  const int64_t size = attention_split_size(context_len);
  return context_len <= size ? 1 : (context_len - 1) / size + 1;
}

constexpr int64_t kMaxShards = 1024;
constexpr int64_t kMaxShardRun = int64_t{1} << 31;

// Twin of spec_kernels/ops/tree_attention/shards.py: position p of the prefix belongs to shard
// (p / run) % num_shards; the tree's rows, and the sinks, to shard 0 alone.
struct ContextShard {
  int64_t index, num_shards, run;

  bool holds_tree() const { return index == 0; }

  // How many positions below `context` are the shard's.
  int64_t local_length(int64_t context) const {
    const int64_t period = run * num_shards;
    const int64_t rest = context % period - index * run;
    return context / period * run + (rest < 0 ? 0 : rest < run ? rest : run);
  }
};

constexpr int kLeafKeys = 256;
constexpr int kTileRows = 32;
constexpr int kMaxJobRows = 512;
constexpr int64_t kMaxHeadDim = 16384;

// What multiplies bf16 queries: fp32 FMA, AVX512-BF16 dot products, or AMX tiles. Chosen once for
// the process, never by shape, since each has its own rounding. fp32 and fp16 always take kFma.
enum class Bf16Math { kFma, kDot, kAmx };

struct TreeAttentionArgs {
  // A query is the concatenation of one or two pieces: [B, N, H, q_dim[i]], strides of the first
  // three dimensions.
  const void* q[2];
  int64_t q_dim[2];
  int64_t q_stride[2][3];
  // A row of `k` is k_dim adjacent elements; strides of page, slot and KV head.
  const void* k;
  const void* v;
  int64_t k_stride[3], v_stride[3];
  void* out;
  float* lse;
  int64_t out_stride[3], lse_stride[3];
  const void* tables;
  bool wide_tables;
  int64_t table_stride[2];
  int64_t page, k_dim, v_dim, num_heads, group;  // group: query heads that share a KV head
  float scale, logit_cap;
  // Of an fp8 cache, else null: what it holds times the scale of its KV head is the key (value).
  const float* k_scale;
  const float* v_scale;
  int64_t k_scale_stride, v_scale_stride;
  const float* sinks;  // of each query head, or null
  int64_t sink_stride;
  Float dtype, cache_dtype;  // the cache's: that of the queries, or fp8
};

// A present query row of the tree (all heads of it).
struct AttentionNode {
  int32_t row;          // n
  bool is_chain;        // the path is slots 0, 1, 2, ...
  int64_t path;         // where its slots begin in AttentionJob::slots; unused for a chain
  int64_t first, last;  // visible positions, first <= last
};

// One unit of work: some nodes of a request, one KV head, an aligned run of leaves. Chain nodes
// come first.
struct AttentionJob {
  int64_t request, kv_head, context;
  const AttentionNode* nodes;
  const int32_t* slots;
  int64_t num_nodes, num_chain;
  int64_t first_leaf, num_leaves;
};

static inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Units of 32 bits in a packed key (an fp32 or a pair of bf16; the fp32 count bounds both), and
// columns of a packed accumulator row.
static inline int64_t packed_units(const TreeAttentionArgs& a) { return round_up(a.k_dim, 16); }
static inline int64_t packed_columns(const TreeAttentionArgs& a) { return round_up(a.v_dim, 32); }

// Accumulators that wait for their right-hand sibling: one for each level of the merge tree, and
// the newest leaf.
static inline int64_t merge_levels(int64_t num_leaves) {
  int64_t levels = 2;
  while (num_leaves > 1) {
    num_leaves = (num_leaves + 1) / 2;
    ++levels;
  }
  return levels;
}

// Floats of one partial result: maxima, sums, then accumulator rows.
static inline int64_t partial_floats(const TreeAttentionArgs& a, int64_t num_rows) {
  return round_up(num_rows, 16) * 2 + num_rows * packed_columns(a);
}

static inline int64_t scratch_floats(const TreeAttentionArgs& a, int64_t num_rows,
                                     int64_t num_leaves) {
  const int64_t pointers = 3 * kLeafKeys * 2;
  const int64_t scores = kTileRows * (kLeafKeys + 16) * 2;
  const int64_t values = packed_columns(a) * (kLeafKeys + 1);
  return round_up(num_rows, kTileRows) * packed_units(a) + kLeafKeys * packed_units(a) + values +
         scores + pointers + merge_levels(num_leaves) * partial_floats(a, num_rows) + 64;
}

// run: attends job's rows to its leaves; the result goes to `partial`, or, when that is null, to
// out and lse. merge: combines the partials of `job` and of the num_partials - 1 runs after it
// (destroying them) into out and lse.
SK_DECLARE_KERNEL(void tree_attention_run(const TreeAttentionArgs& args, const AttentionJob& job,
                                          Bf16Math math, float* scratch, float* partial))
SK_DECLARE_KERNEL(void tree_attention_merge(const TreeAttentionArgs& args, const AttentionJob& job,
                                            Bf16Math math, float* partials, int64_t num_partials))

}  // namespace spec_kernels
