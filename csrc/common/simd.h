// Sixteen fp32 lanes on every instruction set, so that lane order, and with it rounding, is the
// same everywhere except for fused multiply-adds (absent in `plain`). Included only by
// *_cpu_kernels.cpp: everything lives in the namespace SK_ISA, and no standard container may be
// used there, since the linker could otherwise hand a function compiled for AVX-512 to a machine
// without it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#ifndef SK_ISA
#error "simd.h is for files compiled once per instruction set"
#endif

namespace spec_kernels {
namespace SK_ISA {

typedef float F32x16 __attribute__((vector_size(64)));
typedef uint32_t U32x16 __attribute__((vector_size(64)));
typedef int32_t I32x16 __attribute__((vector_size(64)));
typedef uint16_t U16x16 __attribute__((vector_size(32)));
typedef uint8_t U8x16 __attribute__((vector_size(16)));

// bfloat16 as bits: the upper half of an fp32.
struct bf16 {
  uint16_t bits;
};

// IEEE half precision as bits.
struct fp16 {
  uint16_t bits;
};

// float8_e4m3fn as bits: bias 7, subnormals, no infinity, 0x7f and 0xff are NaN.
struct fp8 {
  uint8_t bits;
};

constexpr int kLanes = 16;

#define SK_INLINE static inline __attribute__((always_inline))

// Spelt out so that compilers see a broadcast, which loads can carry for free; `{} + x` costs an
// addition.
SK_INLINE F32x16 splat(float x) { return F32x16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// GCC lowers a comparison of vectors wider than the machine's to one lane at a time, so comparisons
// go through vectors of the machine's own width. A true lane is all ones.
#if defined(__AVX512F__)
constexpr int kNativeLanes = 16;
#elif defined(__AVX2__)
constexpr int kNativeLanes = 8;
#else
constexpr int kNativeLanes = 4;
#endif
constexpr int kPieces = kLanes / kNativeLanes;
typedef float F32Native __attribute__((vector_size(4 * kNativeLanes)));
typedef int32_t I32Native __attribute__((vector_size(4 * kNativeLanes)));

#define SK_BY_PIECES(name, Result, NativeResult, expression) \
  SK_INLINE Result name(F32x16 a, F32x16 b) {                \
    F32Native xs[kPieces], ys[kPieces];                      \
    NativeResult rs[kPieces];                                \
    std::memcpy(xs, &a, sizeof(a));                          \
    std::memcpy(ys, &b, sizeof(b));                          \
    for (int i = 0; i < kPieces; ++i) {                      \
      const F32Native x = xs[i], y = ys[i];                  \
      rs[i] = expression;                                    \
    }                                                        \
    Result result;                                           \
    std::memcpy(&result, rs, sizeof(result));                \
    return result;                                           \
  }
SK_BY_PIECES(max, F32x16, F32Native, x > y ? x : y)  // b where either is NaN
SK_BY_PIECES(min, F32x16, F32Native, x < y ? x : y)  // likewise
SK_BY_PIECES(greater, I32x16, I32Native, x > y)
SK_BY_PIECES(greater_equal, I32x16, I32Native, x >= y)
SK_BY_PIECES(equal, I32x16, I32Native, x == y)
#undef SK_BY_PIECES

// Bit i is lane i of a mask.
SK_INLINE uint32_t lane_bits(I32x16 mask) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
  __m256 half[2];
  std::memcpy(half, &mask, sizeof(mask));
  return static_cast<uint32_t>(_mm256_movemask_ps(half[0]) | _mm256_movemask_ps(half[1]) << 8);
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(mask[i] & 1) << i;
  return bits;
#endif
}

// a where the mask is true, else b.
SK_INLINE F32x16 select(I32x16 mask, F32x16 a, F32x16 b) {
#if defined(__AVX512F__)
  return mask ? a : b;
#else
  return (F32x16)(((I32x16)a & mask) | ((I32x16)b & ~mask));
#endif
}

SK_INLINE F32x16 load(const float* p) {
  F32x16 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

SK_INLINE F32x16 from_bf16(U16x16 h) {
#if defined(__AVX512F__)
  // GCC widens by halves of half the width.
  return (F32x16)((U32x16)_mm512_cvtepu16_epi32((__m256i)h) << 16);
#else
  return (F32x16)(__builtin_convertvector(h, U32x16) << 16);
#endif
}

SK_INLINE F32x16 load(const bf16* p) {
  U16x16 h;
  std::memcpy(&h, p, sizeof(h));
  return from_bf16(h);
}

// All ones where a value below 2^31 is less than `limit`; cheaper than a comparison (see above).
SK_INLINE U32x16 below(U32x16 values, uint32_t limit) {
  return (U32x16)((I32x16)(values - limit) >> 31);
}

// Exponent bias 15 against 127. Scaling by 2^112 does all finite values at once, subnormal ones
// included; an exponent of all ones must stay one.
SK_INLINE F32x16 from_fp16(U16x16 h) {
#if defined(__AVX512F__)
  return (F32x16)_mm512_cvtph_ps((__m256i)h);
#else
  const U32x16 bits = __builtin_convertvector(h, U32x16);
  const U32x16 sign = (bits & 0x8000u) << 16;
  const U32x16 magnitude = (bits & 0x7fffu) << 13;
  const F32x16 scaled = (F32x16)magnitude * 5.192296858534828e33f;  // 2^112
  const U32x16 special = ~below(magnitude, 0x0f800000u);
  return (F32x16)((((U32x16)scaled & ~special) | ((magnitude | 0x7f800000u) & special)) | sign);
#endif
}

SK_INLINE F32x16 load(const fp16* p) {
  U16x16 h;
  std::memcpy(&h, p, sizeof(h));
  return from_fp16(h);
}

// Subnormals are counts of 2^-9; no fp32 subnormal occurs on the way, which some modes flush.
SK_INLINE F32x16 from_fp8(U8x16 b) {
  const U32x16 bits = __builtin_convertvector(b, U32x16);
  const U32x16 sign = (bits & 0x80u) << 24;
  const U32x16 magnitude = bits & 0x7fu;
  const U32x16 normal = (magnitude << 20) + (120u << 23);
  const F32x16 small = __builtin_convertvector((I32x16)magnitude, F32x16) * 0.001953125f;
  const U32x16 is_small = below(magnitude, 8);
  const U32x16 is_nan = ~below(magnitude, 0x7f);
  const U32x16 number = ((U32x16)small & is_small) | (normal & ~is_small);
  return (F32x16)((number & ~is_nan) | (0x7fc00000u & is_nan) | sign);
}

SK_INLINE F32x16 load(const fp8* p) {
  U8x16 b;
  std::memcpy(&b, p, sizeof(b));
  return from_fp8(b);
}

// Reads n < 16 elements; the other lanes are zero.
template <class T>
SK_INLINE F32x16 load_partial(const T* p, int64_t n) {
  T tail[kLanes] = {};
  std::memcpy(tail, p, static_cast<size_t>(n) * sizeof(T));
  return load(tail);
}

#if defined(__AVX512BW__) && defined(__AVX512VL__)
// Masked lanes are never touched, so neither can fault beyond the end of a tensor.
template <>
inline __attribute__((always_inline)) F32x16 load_partial(const float* p, int64_t n) {
  return (F32x16)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
}

template <>
inline __attribute__((always_inline)) F32x16 load_partial(const bf16* p, int64_t n) {
  return from_bf16((U16x16)_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p));
}
#endif

// As many of sixteen elements as there are: n >= 1 may be more.
template <class T>
SK_INLINE F32x16 load_up_to(const T* p, int64_t n) {
  return n >= kLanes ? load(p) : load_partial(p, n);
}

SK_INLINE void store(float* p, F32x16 v) { std::memcpy(p, &v, sizeof(v)); }

// Round to nearest even; a NaN stays a (quiet) NaN.
SK_INLINE U16x16 to_bf16(F32x16 v) {
  const U32x16 bits = (U32x16)v;
  const U32x16 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
#if defined(__AVX512F__)
  const __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
  const __m512i kept =
      _mm512_mask_or_epi32((__m512i)rounded, is_nan, (__m512i)bits, _mm512_set1_epi32(0x400000));
  return (U16x16)_mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
#else
  const U32x16 quiet = bits | 0x400000u;
  const U32x16 is_number = (U32x16)equal(v, v);
  return __builtin_convertvector(((rounded & is_number) | (quiet & ~is_number)) >> 16, U16x16);
#endif
}

SK_INLINE void store(bf16* p, F32x16 v) {
  const U16x16 h = to_bf16(v);
  std::memcpy(p, &h, sizeof(h));
}

// Round to nearest even, overflow to infinity, subnormal results kept, NaN to a quiet NaN.
SK_INLINE U16x16 to_fp16(F32x16 v) {
#if defined(__AVX512F__)
  return (U16x16)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const U32x16 all = (U32x16)v;
  const U32x16 sign = (all >> 16) & 0x8000u;
  const U32x16 bits = all & 0x7fffffffu;
  // Normal: add half a unit in the last place (ties to even) and move the exponent.
  const U32x16 normal = (bits + 0xc8000fffu + ((bits >> 13) & 1u)) >> 13;
  // Subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low mantissa bits.
  const U32x16 small = (U32x16)((F32x16)bits + 0.5f) - 0x3f000000u;
  const U32x16 is_small = below(bits, 0x38800000u);
  const U32x16 is_big = ~below(bits, 0x477ff000u);  // 65520 and above round to infinity
  const U32x16 is_nan = ~below(bits, 0x7f800001u);
  U32x16 h = (small & is_small) | (normal & ~is_small);
  h = (h & ~is_big) | (0x7c00u & is_big);
  h = (h & ~is_nan) | ((0x7e00u | ((bits >> 13) & 0x3ffu)) & is_nan);
  return __builtin_convertvector(h | sign, U16x16);
#endif
}

SK_INLINE void store(fp16* p, F32x16 v) {
  const U16x16 h = to_fp16(v);
  std::memcpy(p, &h, sizeof(h));
}

// Saturates at +-448, then rounds to nearest even; NaN stays NaN.
SK_INLINE U8x16 to_fp8(F32x16 v) {
  const U32x16 all = (U32x16)v;
  const U32x16 sign = (all >> 24) & 0x80u;
  const U32x16 magnitude = all & 0x7fffffffu;
  const U32x16 is_nan = ~below(magnitude, 0x7f800001u);
  const U32x16 is_big = ~below(magnitude, 0x43e00001u);  // beyond 448
  const U32x16 bits = (magnitude & ~is_big) | (0x43e00000u & is_big);
  const U32x16 normal = (bits + 0x7ffffu + ((bits >> 20) & 1u) - (120u << 23)) >> 20;
  // Subnormal: adding 2^14 leaves the rounded multiple of 2^-9 in the low mantissa bits.
  const U32x16 small = (U32x16)((F32x16)bits + 16384.0f) - 0x46800000u;
  const U32x16 is_small = below(bits, 0x3c800000u);  // 2^-6
  const U32x16 number = (small & is_small) | (normal & ~is_small);
  return __builtin_convertvector((number & ~is_nan) | (0x7fu & is_nan) | sign, U8x16);
}

SK_INLINE void store(fp8* p, F32x16 v) {
  const U8x16 b = to_fp8(v);
  std::memcpy(p, &b, sizeof(b));
}

template <class T>
SK_INLINE void store_partial(T* p, F32x16 v, int64_t n) {
  T tail[kLanes];
  store(tail, v);
  std::memcpy(p, tail, static_cast<size_t>(n) * sizeof(T));
}

#if defined(__AVX512BW__) && defined(__AVX512VL__)
template <>
inline __attribute__((always_inline)) void store_partial(float* p, F32x16 v, int64_t n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), (__m512)v);
}

template <>
inline __attribute__((always_inline)) void store_partial(bf16* p, F32x16 v, int64_t n) {
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << n) - 1), (__m256i)to_bf16(v));
}
#endif

template <class T>
SK_INLINE void store_up_to(T* p, F32x16 v, int64_t n) {
  if (n >= kLanes) {
    store(p, v);
  } else {
    store_partial(p, v, n);
  }
}

SK_INLINE float to_float(float x) { return x; }
SK_INLINE float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}

// Rounds through T and back: what a later reader of the stored value sees.
template <class T>
SK_INLINE F32x16 round_to(F32x16 v) {
  T lanes[kLanes];
  store(lanes, v);
  return load(lanes);
}

template <>
inline __attribute__((always_inline)) F32x16 round_to<float>(F32x16 v) {
  return v;
}

template <>
inline __attribute__((always_inline)) F32x16 round_to<bf16>(F32x16 v) {
  return from_bf16(to_bf16(v));
}

// What store() writes, for values that go to more than one place and are read again.
template <class T>
struct Packed;

template <>
struct Packed<float> {
  F32x16 bits;
  explicit Packed(F32x16 v) : bits(v) {}
  F32x16 values() const { return bits; }
};

template <>
struct Packed<bf16> {
  U16x16 bits;
  explicit Packed(F32x16 v) : bits(to_bf16(v)) {}
  F32x16 values() const { return from_bf16(bits); }
};

template <class T>
SK_INLINE void store(T* p, const Packed<T>& packed) {
  std::memcpy(p, &packed.bits, sizeof(packed.bits));
}

// a * b + c. Contraction is off in these files, so this alone decides what is fused.
SK_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
#if defined(__AVX512F__)
  return (F32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  struct Pair {
    __m256 half[2];
  } x, y, z;
  std::memcpy(&x, &a, 64);
  std::memcpy(&y, &b, 64);
  std::memcpy(&z, &c, 64);
  z.half[0] = _mm256_fmadd_ps(x.half[0], y.half[0], z.half[0]);
  z.half[1] = _mm256_fmadd_ps(x.half[1], y.half[1], z.half[1]);
  F32x16 r;
  std::memcpy(&r, &z, 64);
  return r;
#else
  return a * b + c;
#endif
}

typedef float F32x8 __attribute__((vector_size(32)));
typedef float F32x4 __attribute__((vector_size(16)));

// Lanes i and i+8, then i and i+4: the first two levels of the reduction trees below.
SK_INLINE F32x4 fold_add(F32x16 v) {
  F32x8 half[2];
  std::memcpy(half, &v, sizeof(v));
  const F32x8 sum = half[0] + half[1];
  F32x4 quarter[2];
  std::memcpy(quarter, &sum, sizeof(sum));
  return quarter[0] + quarter[1];
}

// One fixed tree: lanes i and i+8, then i and i+4, i+2, i+1.
SK_INLINE float reduce_add(F32x16 v) {
  const F32x4 x = fold_add(v);
  return (x[0] + x[2]) + (x[1] + x[3]);
}

// reduce_add of four vectors at once, by the same tree.
SK_INLINE F32x4 reduce_add(F32x16 a, F32x16 b, F32x16 c, F32x16 d) {
#if defined(__SSE2__)
  const __m128 x = (__m128)fold_add(a), y = (__m128)fold_add(b), z = (__m128)fold_add(c),
               w = (__m128)fold_add(d);
  const __m128 xy = _mm_add_ps(_mm_movelh_ps(x, y), _mm_movehl_ps(y, x));
  const __m128 zw = _mm_add_ps(_mm_movelh_ps(z, w), _mm_movehl_ps(w, z));
  return (F32x4)_mm_add_ps(_mm_shuffle_ps(xy, zw, _MM_SHUFFLE(2, 0, 2, 0)),
                           _mm_shuffle_ps(xy, zw, _MM_SHUFFLE(3, 1, 3, 1)));
#else
  return F32x4{reduce_add(a), reduce_add(b), reduce_add(c), reduce_add(d)};
#endif
}

SK_INLINE float reduce_max(F32x16 v) {
  F32x4 quarter[4];
  std::memcpy(quarter, &v, sizeof(v));
  const F32x4 low = quarter[0] > quarter[2] ? quarter[0] : quarter[2];
  const F32x4 high = quarter[1] > quarter[3] ? quarter[1] : quarter[3];
  const F32x4 x = low > high ? low : high;
  const float even = x[0] > x[2] ? x[0] : x[2];
  const float odd = x[1] > x[3] ? x[1] : x[3];
  return even > odd ? even : odd;
}

// e^x to about 2 ulp over the whole range: x = n ln 2 + r, a degree-6 polynomial in r, exponent
// added to the bits. -inf and anything below -87.3 give 0; above 88.7 gives +inf; NaN stays NaN.
SK_INLINE F32x16 exp(F32x16 x) {
  const F32x16 clamped = min(max(x, splat(-87.33654f)), splat(88.72283f));
  const F32x16 kMagic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F32x16 n = (clamped * 1.44269504f + kMagic) - kMagic;
  F32x16 r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  F32x16 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  // Two steps keep 2^128 and 2^-126 reachable without an exponent overflow in between.
  const I32x16 whole = __builtin_convertvector(n, I32x16);
  const I32x16 half = whole >> 1;
  const F32x16 result = p * (F32x16)((half + 127) << 23) * (F32x16)((whole - half + 127) << 23);
  const F32x16 low = select(greater(splat(-87.33654f), x), splat(0.0f), result);
  const F32x16 high = select(greater(x, splat(88.72283f)), splat(__builtin_inff()), low);
  return select(equal(x, x), high, x);
}

}  // namespace SK_ISA
}  // namespace spec_kernels
