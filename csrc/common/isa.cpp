#include "common/isa.h"

#include <cstdlib>
#include <cstring>

namespace spec_kernels {
namespace {

Isa detect() {
  Isa best = Isa::kPlain;
#if defined(SK_MULTI_ISA)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = Isa::kAvx2;
  if (best == Isa::kAvx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    best = Isa::kAvx512;
  }
  if (const char* wanted = std::getenv("SPEC_KERNELS_CPU_ISA")) {
    if (std::strcmp(wanted, "plain") == 0) best = Isa::kPlain;
    if (std::strcmp(wanted, "avx2") == 0 && best == Isa::kAvx512) best = Isa::kAvx2;
  }
#endif
  return best;
}

}  // namespace

Isa cpu_isa() {
  static const Isa isa = detect();
  return isa;
}

}  // namespace spec_kernels

extern "C" __attribute__((visibility("default"))) const char* spec_kernels_cpu_isa() {
  switch (spec_kernels::cpu_isa()) {
    case spec_kernels::Isa::kAvx512:
      return "avx512";
    case spec_kernels::Isa::kAvx2:
      return "avx2";
    default:
      return "plain";
  }
}
