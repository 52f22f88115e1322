// Marks for rules of an op that its CPU and its CUDA kernel share.
#pragma once

#if defined(__CUDACC__)
#define SK_HOST_DEVICE __host__ __device__
#define SK_FORCE_INLINE __forceinline__  // a call would put what it is passed into memory
#else
#define SK_HOST_DEVICE
#define SK_FORCE_INLINE inline
#endif

namespace spec_kernels {

// True only where the tests break one mechanism of their library at a time
// (tests/cuda_on_host/mutants.py); in the package the condition compiles to nothing.
#if defined(SK_MUTANTS)
extern const char* chosen_mutant;  // null: none
bool is_chosen(const char* name);
inline bool mutant(const char* name) { return chosen_mutant && is_chosen(name); }
#else
SK_HOST_DEVICE constexpr bool mutant(const char*) { return false; }
#endif

}  // namespace spec_kernels
