// The one order in which the squares of a row are added up, so that every op that normalises gives
// the same bits. Included only by *_cpu_kernels.cpp (see simd.h).
#pragma once

#include "common/simd.h"

namespace spec_kernels {
namespace SK_ISA {

// Even and odd blocks of sixteen are added up apart. The two sums change places at each block,
// which registers do for nothing, and their total does not depend on which is which.
struct MeanSquare {
  F32x16 next = {}, other = {};

  // The next sixteen elements; zeros beyond the end.
  inline __attribute__((always_inline)) void add(F32x16 x) {
    const F32x16 sum = fma(x, x, next);
    next = other;
    other = sum;
  }

  // 1 / sqrt(mean + eps) of `num` elements.
  inline __attribute__((always_inline)) float inverse_root(int64_t num, float eps) const {
    const float mean = reduce_add(next + other) / static_cast<float>(num);
    return 1.0f / __builtin_sqrtf(mean + eps);
  }
};

}  // namespace SK_ISA
}  // namespace spec_kernels
