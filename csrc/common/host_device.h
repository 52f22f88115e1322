// Marks for rules of an op that its CPU and its CUDA kernel share.
#pragma once

#if defined(__CUDACC__)
#define SK_HOST_DEVICE __host__ __device__
#else
#define SK_HOST_DEVICE
#endif

namespace spec_kernels {

// True only in a library that the tests compiled with -DSK_MUTANT="name", to be wrong in this one
// way (tests/cuda_on_host/test_mutants.py); elsewhere the condition compiles to nothing.
SK_HOST_DEVICE constexpr bool mutant([[maybe_unused]] const char* name) {
#if defined(SK_MUTANT)
  const char* chosen = SK_MUTANT;
  while (*chosen && *chosen == *name) ++chosen, ++name;
  return *chosen == *name;
#else
  return false;
#endif
}

}  // namespace spec_kernels
