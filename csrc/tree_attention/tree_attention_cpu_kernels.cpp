// One body, compiled for each way to multiply (tree_attention.h, Bf16Math) inside each instruction
// set.
#include "common/simd.h"
#include "tree_attention/tree_attention.h"

#define SK_MATH_FMA 0
#define SK_MATH_DOT 1
#define SK_MATH_AMX 2

namespace spec_kernels {
namespace SK_ISA {
namespace {

#define SK_INLINE_MEMBER inline __attribute__((always_inline))

constexpr float kInf = __builtin_inff();
constexpr float kMaxFloat = 3.402823466e38f;

SK_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
SK_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

SK_INLINE bool is_finite(F32x16 v) {
  return reduce_max((v - v) != 0.0f ? splat(1.0f) : splat(0.0f)) == 0.0f;
}

// e^x for x <= 0, 0 below -104: what the weights of a softmax need. NaN stays NaN.
SK_INLINE F32x16 exp_weight(F32x16 x) {
#if defined(__AVX512F__)
  const __m512 low =
      _mm512_max_ps(_mm512_set1_ps(-110.0f), (__m512)x);  // the second operand wins when it is NaN
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(low, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-0.693359375f), low);
  r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 720);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return (F32x16)_mm512_scalef_ps(p, n);
#else
  return exp(x);
#endif
}

SK_INLINE float exp_one(float x) { return exp_weight(splat(x))[0]; }

// What a KV head's cache is to be multiplied by.
SK_INLINE float head_scale(const float* scales, int64_t stride, int64_t kv_head) {
  return scales ? scales[kv_head * stride] : 1.0f;
}

// Near zero the continued fraction x / (1 + x^2 / (3 + x^2 / (5 + ...))), which keeps the relative
// error of small scores; elsewhere 1 - 2 / (e^2|x| + 1).
SK_INLINE F32x16 tanh(F32x16 x) {
  const F32x16 size = x < 0.0f ? -x : x;
  const F32x16 z = x * x;
  const F32x16 small = x * (945.0f + z * (105.0f + z)) / (945.0f + z * (420.0f + z * 15.0f));
  const F32x16 large = 1.0f - 2.0f / (exp(size + size) + 1.0f);
  return size < 0.75f ? small : x < 0.0f ? -large : large;
}

// Where `transpose` finds row i: by pointers, `offset` words in; or in a block.
struct RowsAt {
  const void* const* rows;
  int64_t offset;
  SK_INLINE_MEMBER const uint32_t* operator()(int i) const {
    return static_cast<const uint32_t*>(rows[i]) + offset;
  }
};

struct Block {
  const uint32_t* words;
  SK_INLINE_MEMBER const uint32_t* operator()(int i) const { return words + 16 * i; }
};

// out[u * 16 + i] = in(i)[u] for 16 rows of 16 words.
template <class In>
SK_INLINE void transpose(const In& in, uint32_t* out) {
#if defined(__AVX512F__)
  for (int j = 0; j < 16; j += 4) {
    __m512i z[4];
    for (int i = 0; i < 4; ++i) {
      __m128i quads[4];
      for (int k = 0; k < 4; ++k)
        quads[k] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in(i + 4 * k) + j));
      z[i] = _mm512_castsi128_si512(quads[0]);
      z[i] = _mm512_inserti32x4(z[i], quads[1], 1);
      z[i] = _mm512_inserti32x4(z[i], quads[2], 2);
      z[i] = _mm512_inserti32x4(z[i], quads[3], 3);
    }
    const __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
    const __m512i c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
    _mm512_storeu_si512(out + 16 * (j + 0), _mm512_unpacklo_epi64(a, c));
    _mm512_storeu_si512(out + 16 * (j + 1), _mm512_unpackhi_epi64(a, c));
    _mm512_storeu_si512(out + 16 * (j + 2), _mm512_unpacklo_epi64(b, d));
    _mm512_storeu_si512(out + 16 * (j + 3), _mm512_unpackhi_epi64(b, d));
  }
#elif defined(__AVX2__)
  for (int i = 0; i < 16; i += 8) {
    for (int u = 0; u < 16; u += 8) {
      __m256i low[4], high[4], quads[8];
      for (int k = 0; k < 4; ++k) {
        const auto row = [&](int r) {
          return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in(i + r) + u));
        };
        const __m256i x = row(2 * k), y = row(2 * k + 1);
        low[k] = _mm256_unpacklo_epi32(x, y);
        high[k] = _mm256_unpackhi_epi32(x, y);
      }
      for (int k = 0; k < 2; ++k) {
        quads[4 * k + 0] = _mm256_unpacklo_epi64(low[2 * k], low[2 * k + 1]);
        quads[4 * k + 1] = _mm256_unpackhi_epi64(low[2 * k], low[2 * k + 1]);
        quads[4 * k + 2] = _mm256_unpacklo_epi64(high[2 * k], high[2 * k + 1]);
        quads[4 * k + 3] = _mm256_unpackhi_epi64(high[2 * k], high[2 * k + 1]);
      }
      for (int j = 0; j < 4; ++j) {
        const auto column = [&](int c) {
          return reinterpret_cast<__m256i*>(out + (u + c) * 16 + i);
        };
        _mm256_storeu_si256(column(j), _mm256_permute2x128_si256(quads[j], quads[j + 4], 0x20));
        _mm256_storeu_si256(column(j + 4), _mm256_permute2x128_si256(quads[j], quads[j + 4], 0x31));
      }
    }
  }
#else
  for (int i = 0; i < 16; ++i) {
    for (int u = 0; u < 16; ++u) std::memcpy(out + u * 16 + i, in(i) + u, sizeof(uint32_t));
  }
#endif
}

}  // namespace

namespace fma_math {
#define SK_MATH SK_MATH_FMA
#include "tree_attention/tree_attention_cpu_body.inl.h"
#undef SK_MATH
}  // namespace fma_math

// Compilers older than these do not know the sets; bf16 then goes through fp32 FMA.
#if defined(__AVX512F__) && (defined(__clang__) || __GNUC__ >= 11)
#define SK_BF16_SETS 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512bf16")
#endif
namespace dot_math {
#define SK_MATH SK_MATH_DOT
#include "tree_attention/tree_attention_cpu_body.inl.h"
#undef SK_MATH
}  // namespace dot_math
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512bf16,amx-tile,amx-bf16"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512bf16,amx-tile,amx-bf16")
#endif
namespace amx_math {
#define SK_MATH SK_MATH_AMX
#include "tree_attention/tree_attention_cpu_body.inl.h"
#undef SK_MATH
}  // namespace amx_math
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

void tree_attention_run(const TreeAttentionArgs& args, const AttentionJob& job, Bf16Math math,
                        float* scratch, float* partial) {
  if (args.dtype == Float::kF32) return fma_math::run<float>(args, job, scratch, partial);
  if (args.dtype == Float::kF16) return fma_math::run<fp16>(args, job, scratch, partial);
#if defined(SK_BF16_SETS)
  if (math == Bf16Math::kAmx) return amx_math::run<bf16>(args, job, scratch, partial);
  if (math == Bf16Math::kDot) return dot_math::run<bf16>(args, job, scratch, partial);
#endif
  fma_math::run<bf16>(args, job, scratch, partial);
}

void tree_attention_merge(const TreeAttentionArgs& args, const AttentionJob& job, Bf16Math math,
                          float* partials, int64_t num_partials) {
  if (args.dtype == Float::kF32) return fma_math::merge<float>(args, job, partials, num_partials);
  if (args.dtype == Float::kF16) return fma_math::merge<fp16>(args, job, partials, num_partials);
#if defined(SK_BF16_SETS)
  if (math == Bf16Math::kAmx) return amx_math::merge<bf16>(args, job, partials, num_partials);
  if (math == Bf16Math::kDot) return dot_math::merge<bf16>(args, job, partials, num_partials);
#endif
  fma_math::merge<bf16>(args, job, partials, num_partials);
}

}  // namespace SK_ISA
}  // namespace spec_kernels
