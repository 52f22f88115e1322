#include "common/simd.h"
#include "pcie_allreduce/pcie_allreduce.h"

namespace spec_kernels {
namespace SK_ISA {
namespace {

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

// The same tree over `num` operands, for the lossy forms, which are not in a hurry.
F32x16 tree_of(const F32x16* x, int num, int width = group::kMaxRanks) {
  if (width == 1) return x[0];
  const int half = width / 2;
  if (num <= half) return tree_of(x, num, half);
  return tree_of(x, half, half) + tree_of(x + half, num - half, half);
}

struct Fp8Code {
  static constexpr float kMost = 448.0f;
  static F32x16 round(F32x16 v) { return round_to<fp8>(v); }
};

struct Int8Code {
  static constexpr float kMost = 127.0f;
  // To even, and without a negative zero, which an integer does not have.
  static F32x16 round(F32x16 v) { return (v + 12582912.0f) - 12582912.0f; }  // 1.5 * 2^23
};

constexpr int kGroupVectors = slab::kScaleGroup / kLanes;

// What is left of a group that has been on the wire. One value that is not finite makes all NaN.
template <class Code>
void send(F32x16* x, int64_t stride) {
  U32x16 most = {};
  for (int i = 0; i < kGroupVectors; ++i) {
    const U32x16 magnitude = (U32x16)x[i * stride] & 0x7fffffffu;
    most = most > magnitude ? most : magnitude;
  }
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits = most[i] > bits ? most[i] : bits;
  float amax;
  std::memcpy(&amax, &bits, sizeof(amax));
  const float scale = bits < 0x7f800000u ? amax / Code::kMost : __builtin_nanf("");
  const F32x16 divisor = splat(scale == 0.0f ? 1.0f : scale);
  for (int i = 0; i < kGroupVectors; ++i) {
    const F32x16 scaled = x[i * stride] / divisor;
    const F32x16 clamped = min(max(scaled, splat(-Code::kMost)), splat(Code::kMost));
    x[i * stride] = Code::round(clamped) * splat(scale);
  }
}

template <class T, class Code>
void reduce_coded(const ReduceArgs& a) {
  for (int64_t begin = 0; begin < a.num; begin += slab::kScaleGroup) {
    F32x16 x[kGroupVectors][group::kMaxRanks];
    F32x16 sum[kGroupVectors];
    for (int r = 0; r < a.num_ranks; ++r) {
      for (int i = 0; i < kGroupVectors; ++i)
        x[i][r] = load(static_cast<const T*>(a.in[r]) + begin + i * kLanes);
      send<Code>(&x[0][r], group::kMaxRanks);
    }
    for (int i = 0; i < kGroupVectors; ++i) sum[i] = tree_of(x[i], a.num_ranks);
    send<Code>(sum, 1);
    for (int i = 0; i < kGroupVectors; ++i) {
      const int64_t at = begin + i * kLanes;
      store(static_cast<T*>(a.out) + at, sum[i]);
      if (a.copy) store(static_cast<T*>(a.copy) + at, sum[i]);
    }
  }
}

template <class T>
void reduce_islands(const ReduceArgs& a) {
  const int num_islands = a.num_ranks / a.island_size;
  for (int64_t begin = 0; begin < a.num; begin += kLanes) {
    const int64_t num = a.num - begin;
    F32x16 x[group::kMaxRanks];
    for (int r = 0; r < a.num_ranks; ++r)
      x[r] = load_up_to(static_cast<const T*>(a.in[r]) + begin, num);
    F32x16 partial[group::kMaxRanks];
    for (int i = 0; i < num_islands; ++i)
      partial[i] = round_to<bf16>(tree_of(x + i * a.island_size, a.island_size));
    const F32x16 sum = tree_of(partial, num_islands);
    store_up_to(static_cast<T*>(a.out) + begin, sum, num);
    if (a.copy) store_up_to(static_cast<T*>(a.copy) + begin, sum, num);
  }
}

template <class T>
void reduce_ranks(const ReduceArgs& a) {
  switch (a.rounding) {
    case Rounding::kBf16Islands:
      return reduce_islands<T>(a);
    case Rounding::kFp8:
      return reduce_coded<T, Fp8Code>(a);
    case Rounding::kInt8:
      return reduce_coded<T, Int8Code>(a);
    default:
      break;
  }
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
