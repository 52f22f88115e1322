// fp16 as cuda_fp16.h has it: conversions round to nearest even, a NaN becomes 0x7fff.
#pragma once

#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};

inline float __half2float(__half v) {
  const unsigned sign = static_cast<unsigned>(v.bits & 0x8000u) << 16;
  const unsigned exponent = v.bits >> 10 & 0x1fu, fraction = v.bits & 0x3ffu;
  if (exponent == 0x1fu) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
    return __uint_as_float(sign | __float_as_uint(magnitude));
  }
  return __uint_as_float(sign | (exponent + 112u) << 23 | fraction << 13);
}
inline __half __float2half_rn(float v) {
  const unsigned u = __float_as_uint(v), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {0x7fff};
  if (magnitude >= 0x47800000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65536 and more
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the unit is 2^-24: adding 0.5, whose own unit is that, rounds to it.
    const unsigned rounded = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u;
    return {static_cast<uint16_t>(sign | rounded)};
  }
  const unsigned rounded = magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u);
  return {static_cast<uint16_t>(sign | rounded >> 13)};
}
inline __half __float2half(float v) { return __float2half_rn(v); }
inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}
inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }
