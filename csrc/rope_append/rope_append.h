// The front of verify attention, one pass over each new row: queries and keys are rotated by the
// row's position (context_len + depth), K/V or the latent go to its place in the paged cache
// (cache_len + slot), the latent normalised, both quantised where the cache is fp8.
//
// Arithmetic is fp32 without contraction and rounded once: (x, y) -> (x c - y s, y c + x s). A
// row's bits depend on nothing but the row.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace spec_kernels {

enum class RopeRule { kRotate, kCopy, kNorm };

// What becomes of one input of a row: num_heads vectors of `dim` elements, read at
// [request, row, head], written at [request, row, head] or, in the cache, at [page, slot, head].
struct RopePart {
  RopeRule rule;
  const void* in;
  int64_t in_stride[3];
  void* out;
  int64_t out_stride[3];
  bool to_cache;
  int64_t num_heads, dim;
  const float* scale;  // per head; null unless the cache is fp8
  int64_t scale_stride;
};

struct RopeAppendArgs {
  static constexpr int kNumParts = 3;
  RopePart parts[kNumParts];
  const float* cos_sin;  // a row: `half` cosines, then as many sines
  int64_t cos_sin_stride, half;
  bool interleaved;
  const void* norm_weight;
  float eps;
  Float dtype, cache_dtype;
};

// A present row.
struct RopeRow {
  int64_t request, row, position, page, slot;
};

// `scratch`: 4 * half + 32 floats.
SK_DECLARE_KERNEL(void rope_append_rows(const RopeAppendArgs& args, const RopeRow* rows,
                                        int64_t num_rows, float* scratch))

}  // namespace spec_kernels
