// Collectives of up to eight ranks over one shared segment (group.h): all-reduce, all-gather,
// broadcast, barrier.
//
// The sum is ((r0+r1)+(r2+r3))+((r4+r5)+(r6+r7)) in fp32 with one rounding at the end. With fewer
// ranks an operand that is absent is skipped, not taken as zero (-0 + 0 would lose the sign): 3
// ranks (r0+r1)+r2; 5 ((r0+r1)+(r2+r3))+r4; 6 (...)+(r4+r5); 7 (...)+((r4+r5)+r6). Infinities and
// NaN follow IEEE arithmetic; a NaN's payload is not specified.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "pcie_allreduce/group.h"
#include "pcie_allreduce/slab.h"

namespace spec_kernels {

enum class Summand { kF32, kBf16, kF16 };

// Where a sum is rounded besides its end; reference.py defines the lossy ones.
enum class Rounding { kOnce, kBf16Islands, kFp8, kInt8 };

struct ReduceArgs {
  const void* in[group::kMaxRanks];
  int num_ranks;
  Rounding rounding;
  int island_size;  // for kBf16Islands: consecutive ranks whose partial sum is rounded
  void* out;
  void* copy;  // written like `out`, or null
  int64_t num;
  Summand type;
};

// `out` and `copy` may be one of the inputs, at the same address; no other overlap. With scales,
// `num` is a multiple of slab::kScaleGroup.
SK_DECLARE_KERNEL(void pcie_reduce(const ReduceArgs& args))

}  // namespace spec_kernels
