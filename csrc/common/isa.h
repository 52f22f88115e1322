// Run-time choice of instruction set. A file named *_cpu_kernels.cpp is compiled once for each set,
// with SK_ISA naming the namespace, and its entry points are picked here.
// SPEC_KERNELS_CPU_ISA=plain|avx2|avx512|avx512_bf16 lowers the choice; unset, everything that the
// machine has is used.
#pragma once

// Whether the compiler knows AVX512-BF16 and AMX.
#if defined(SK_MULTI_ISA) && __has_include(<amxbf16intrin.h>)
#define SK_HAS_BF16_ISA 1
#else
#define SK_HAS_BF16_ISA 0
#endif

namespace spec_kernels {

enum class Isa { kPlain = 0, kAvx2 = 1, kAvx512 = 2 };

// The best set that this CPU has and the build contains.
Isa cpu_isa();

// Extensions that functions inside the avx512 objects may use through a target attribute (the
// objects themselves must run on any AVX-512 machine). Each implies cpu_isa() == kAvx512; AMX-BF16
// implies AVX512-BF16. The first question about AMX asks the kernel for permission to use the
// tiles, which holds for every thread of the process.
bool cpu_has_avx512_bf16();
bool cpu_has_amx_bf16();

}  // namespace spec_kernels

// SK_DECLARE_KERNEL(void f(int)) declares f once in each instruction set's namespace; SK_KERNEL(f)
// is the chosen one.
#if defined(SK_MULTI_ISA)
#define SK_DECLARE_KERNEL(...) \
  namespace plain {            \
  __VA_ARGS__;                 \
  }                            \
  namespace avx2 {             \
  __VA_ARGS__;                 \
  }                            \
  namespace avx512 {           \
  __VA_ARGS__;                 \
  }
#define SK_KERNEL(name)                                                      \
  (::spec_kernels::cpu_isa() == ::spec_kernels::Isa::kAvx512 ? &avx512::name \
   : ::spec_kernels::cpu_isa() == ::spec_kernels::Isa::kAvx2 ? &avx2::name   \
                                                             : &plain::name)
#else
#define SK_DECLARE_KERNEL(...) \
  namespace plain {            \
  __VA_ARGS__;                 \
  }
#define SK_KERNEL(name) (&plain::name)
#endif
