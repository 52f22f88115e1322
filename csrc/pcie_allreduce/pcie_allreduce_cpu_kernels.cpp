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
