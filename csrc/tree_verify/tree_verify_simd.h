// The arithmetic of the weights on sixteen values, for *_cpu_kernels.cpp: the bits of every other
// backend.
#pragma once

#include "common/simd.h"
#include "tree_verify/tree_verify.h"

namespace spec_kernels {
namespace SK_ISA {
namespace {

SK_INLINE I32x16 lanes() { return I32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

struct Math {
  SK_INLINE F32x16 add(F32x16 a, F32x16 b) { return a + b; }
  SK_INLINE F32x16 add(F32x16 a, float b) { return a + b; }
  SK_INLINE F32x16 mul(F32x16 a, F32x16 b) { return a * b; }
  SK_INLINE F32x16 mul(F32x16 a, float b) { return a * b; }
  SK_INLINE F32x16 at_least(F32x16 a, float b) { return max(a, splat(b)); }
  SK_INLINE F32x16 zero_where_equal(F32x16 a, float b, F32x16 otherwise) {
    return select(equal(a, splat(b)), splat(0.0f), otherwise);
  }
  SK_INLINE F32x16 times_power_of_two(F32x16 p, F32x16 n) {
    return p * (F32x16)((__builtin_convertvector(n, I32x16) + 127) << 23);
  }
};

SK_INLINE F32x16 log_weight(const Weights& w, F32x16 v) {
  return spec_kernels::log_weight<Math>(v, w.greatest, w.inverse_temperature);
}

SK_INLINE F32x16 exp_weight(F32x16 x) { return spec_kernels::exp_weight<Math>(x); }

// weight * 2^40 truncated, as high * 2^16 + low.
struct Fixed {
  U32x16 high, low;
};

SK_INLINE Fixed to_fixed(F32x16 weight) {
  const F32x16 scaled = weight * 16777216.0f;
  const I32x16 high = __builtin_convertvector(scaled, I32x16);
  const F32x16 fraction = scaled - __builtin_convertvector(high, F32x16);
  const I32x16 low = __builtin_convertvector(fraction * 65536.0f, I32x16);
  return {(U32x16)high, (U32x16)low};
}

SK_INLINE uint64_t fixed_lane(const Fixed& q, int lane) {
  return (uint64_t{q.high[lane]} << 16) + q.low[lane];
}

SK_INLINE uint32_t sum(U32x16 v) {
  uint32_t x[kLanes];
  std::memcpy(x, &v, sizeof(v));
  uint32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += x[i];
  return total;
}

}  // namespace
}  // namespace SK_ISA
}  // namespace spec_kernels
