#include "common/simd.h"
#include "pcie_allreduce/pcie_allreduce.h"

namespace spec_kernels {
namespace SK_ISA {
namespace {

struct fp16 {
  uint16_t bits;
};

// Exponent bias 15 against 127. Scaling by 2^112 does all finite values at once, subnormal ones
// included; an exponent of all ones must stay one.
inline F32x16 from_fp16(U16x16 h) {
#if defined(__AVX512F__)
  return (F32x16)_mm512_cvtph_ps((__m256i)h);
#else
  const U32x16 bits = __builtin_convertvector(h, U32x16);
  const U32x16 sign = (bits & 0x8000u) << 16;
  const U32x16 magnitude = (bits & 0x7fffu) << 13;
  const F32x16 scaled = (F32x16)magnitude * 5.192296858534828e33f;  // 2^112
  const U32x16 special = (U32x16)(magnitude >= 0x0f800000u);
  return (F32x16)((((U32x16)scaled & ~special) | ((magnitude | 0x7f800000u) & special)) | sign);
#endif
}

// Round to nearest even, overflow to infinity, subnormal results kept, NaN to a quiet NaN.
inline U16x16 to_fp16(F32x16 v) {
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
  const U32x16 is_small = (U32x16)(bits < 0x38800000u);
  const U32x16 is_big = (U32x16)(bits >= 0x477ff000u);  // 65520 and above round to infinity
  const U32x16 is_nan = (U32x16)(bits > 0x7f800000u);
  U32x16 h = (small & is_small) | (normal & ~is_small);
  h = (h & ~is_big) | (0x7c00u & is_big);
  h = (h & ~is_nan) | ((0x7e00u | ((bits >> 13) & 0x3ffu)) & is_nan);
  return __builtin_convertvector(h | sign, U16x16);
#endif
}

inline F32x16 load(const fp16* p) {
  U16x16 h;
  std::memcpy(&h, p, sizeof(h));
  return from_fp16(h);
}

inline void store(fp16* p, F32x16 v) {
  const U16x16 h = to_fp16(v);
  std::memcpy(p, &h, sizeof(h));
}

using SK_ISA::load;
using SK_ISA::store;

// Operands [First, First + Width) of the canonical tree, those below kRanks; Width is a power of
// two.
template <int kFirst, int kWidth, int kRanks>
inline F32x16 tree(const F32x16* x) {
  if constexpr (kWidth == 1) {
    return x[kFirst];
  } else if constexpr (kFirst + kWidth / 2 >= kRanks) {
    return tree<kFirst, kWidth / 2, kRanks>(x);
  } else {
    return tree<kFirst, kWidth / 2, kRanks>(x) + tree<kFirst + kWidth / 2, kWidth / 2, kRanks>(x);
  }
}

template <class T, int kRanks>
void reduce(const ReduceArgs& a) {
  const T* in[kRanks];
  for (int r = 0; r < kRanks; ++r) in[r] = static_cast<const T*>(a.in[r]);
  T* out = static_cast<T*>(a.out);
  T* copy = static_cast<T*>(a.copy);
  const int64_t full = a.num / kLanes * kLanes;
  for (int64_t i = 0; i < full; i += kLanes) {
    F32x16 x[kRanks];
    for (int r = 0; r < kRanks; ++r) x[r] = load(in[r] + i);
    const F32x16 sum = tree<0, group::kMaxRanks, kRanks>(x);
    store(out + i, sum);
    if (copy) store(copy + i, sum);
  }
  if (const int64_t rest = a.num - full) {
    const size_t bytes = static_cast<size_t>(rest) * sizeof(T);
    F32x16 x[kRanks];
    T tail[kLanes] = {};
    for (int r = 0; r < kRanks; ++r) {
      std::memcpy(tail, in[r] + full, bytes);
      x[r] = load(tail);
    }
    store(tail, tree<0, group::kMaxRanks, kRanks>(x));
    std::memcpy(out + full, tail, bytes);
    if (copy) std::memcpy(copy + full, tail, bytes);
  }
}

template <class T>
void reduce_ranks(const ReduceArgs& a) {
  switch (a.num_ranks) {
    case 2:
      return reduce<T, 2>(a);
    case 3:
      return reduce<T, 3>(a);
    case 4:
      return reduce<T, 4>(a);
    case 5:
      return reduce<T, 5>(a);
    case 6:
      return reduce<T, 6>(a);
    case 7:
      return reduce<T, 7>(a);
    case 8:
      return reduce<T, 8>(a);
    default:
      return reduce<T, 1>(a);
  }
}

}  // namespace

void pcie_reduce(const ReduceArgs& args) {
  switch (args.type) {
    case Summand::kF32:
      return reduce_ranks<float>(args);
    case Summand::kBf16:
      return reduce_ranks<bf16>(args);
    default:
      return reduce_ranks<fp16>(args);
  }
}

}  // namespace SK_ISA
}  // namespace spec_kernels
