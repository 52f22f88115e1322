#include "common/isa.h"

#include <cstdlib>
#include <cstring>

#if defined(SK_MULTI_ISA)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace spec_kernels {
namespace {

Isa detect() {
  Isa best = Isa::kPlain;
#if defined(SK_MULTI_ISA)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = Isa::kAvx2;
  if (best == Isa::kAvx2 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    best = Isa::kAvx512;
  }
  if (const char* wanted = std::getenv("SPEC_KERNELS_CPU_ISA")) {
    if (std::strcmp(wanted, "plain") == 0) best = Isa::kPlain;
    if (std::strcmp(wanted, "avx2") == 0 && best == Isa::kAvx512) best = Isa::kAvx2;
  }
#endif
  return best;
}

bool wanted_is(const char* name) {
  const char* wanted = std::getenv("SPEC_KERNELS_CPU_ISA");
  return wanted && std::strcmp(wanted, name) == 0;
}

bool detect_avx512_bf16() {
#if SK_HAS_BF16_ISA
  unsigned a, b, c, d;
  return cpu_isa() == Isa::kAvx512 && !wanted_is("avx512") &&
         __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
#else
  return false;
#endif
}

bool detect_amx_bf16() {
#if SK_HAS_BF16_ISA && defined(__linux__)
  if (!cpu_has_avx512_bf16() || wanted_is("avx512_bf16")) return false;
  constexpr unsigned kAmxBf16 = 1u << 22;
  constexpr unsigned kAmxTile = 1u << 24;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kAmxBf16) || !(d & kAmxTile)) return false;
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

Isa cpu_isa() {
  static const Isa isa = detect();
  return isa;
}

bool cpu_has_avx512_bf16() {
  static const bool has = detect_avx512_bf16();
  return has;
}

bool cpu_has_amx_bf16() {
  static const bool has = detect_amx_bf16();
  return has;
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

// What multiplies bf16 pairs where a kernel has such a form.
extern "C" __attribute__((visibility("default"))) const char* spec_kernels_cpu_bf16() {
  if (spec_kernels::cpu_has_amx_bf16()) return "amx_bf16";
  return spec_kernels::cpu_has_avx512_bf16() ? "avx512_bf16" : "fp32";
}
