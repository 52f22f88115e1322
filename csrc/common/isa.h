// Run-time choice of instruction set. A file named *_cpu_kernels.cpp is compiled once for each set, with SK_ISA naming
// the namespace, and its entry points are picked here. SPEC_KERNELS_CPU_ISA=plain|avx2|avx512 lowers the choice.
#pragma once

namespace spec_kernels {

enum class Isa { kPlain = 0, kAvx2 = 1, kAvx512 = 2 };

// The best set that this CPU has and the build contains.
Isa cpu_isa();

}  // namespace spec_kernels

// SK_DECLARE_KERNEL(void f(int)) declares f once in each instruction set's namespace; SK_KERNEL(f) is the chosen one.
#if defined(SK_MULTI_ISA)
#define SK_DECLARE_KERNEL(...)  \
  namespace plain {             \
  __VA_ARGS__;                  \
  }                             \
  namespace avx2 {              \
  __VA_ARGS__;                  \
  }                             \
  namespace avx512 {            \
  __VA_ARGS__;                  \
  }
#define SK_KERNEL(name)                                                          \
  (::spec_kernels::cpu_isa() == ::spec_kernels::Isa::kAvx512 ? &avx512::name     \
   : ::spec_kernels::cpu_isa() == ::spec_kernels::Isa::kAvx2 ? &avx2::name       \
                                                             : &plain::name)
#else
#define SK_DECLARE_KERNEL(...) \
  namespace plain {            \
  __VA_ARGS__;                 \
  }
#define SK_KERNEL(name) (&plain::name)
#endif
