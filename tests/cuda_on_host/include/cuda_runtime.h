// The part of CUDA that the kernels use, on the emulated machine of simt.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "simt.h"

#define SK_CUDA_ON_HOST 1

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

constexpr int warpSize = 32;

struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// Barriers and warp collectives

inline void __syncthreads(SIMT_SITE) { simt::barrier(simt::Kind::kBarrier, 0, SIMT_HERE); }
inline int __syncthreads_or(int predicate, SIMT_SITE) {
  return simt::barrier(simt::Kind::kBarrierOr, predicate, SIMT_HERE);
}
inline int __syncthreads_and(int predicate, SIMT_SITE) {
  return simt::barrier(simt::Kind::kBarrierAnd, predicate, SIMT_HERE);
}
inline int __syncthreads_count(int predicate, SIMT_SITE) {
  return simt::barrier(simt::Kind::kBarrierCount, predicate, SIMT_HERE);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_SITE) {
  simt::collective(simt::Kind::kSyncWarp, mask, 0, 0, 32, SIMT_HERE);
}

namespace simt {
template <class T>
inline T shuffle(Kind kind, unsigned mask, T value, int lane, int width, Site site) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8, "at most 64 bits are shuffled");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = collective(kind, mask, bits, lane, width, site);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
}  // namespace simt

template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, SIMT_SITE) {
  return simt::shuffle(simt::Kind::kShfl, mask, value, lane, width, SIMT_HERE);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane, int width = 32, SIMT_SITE) {
  return simt::shuffle(simt::Kind::kShflXor, mask, value, lane, width, SIMT_HERE);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_SITE) {
  return simt::shuffle(simt::Kind::kShflUp, mask, value, static_cast<int>(delta), width, SIMT_HERE);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_SITE) {
  return simt::shuffle(simt::Kind::kShflDown, mask, value, static_cast<int>(delta), width,
                       SIMT_HERE);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_SITE) {
  return static_cast<unsigned>(
      simt::collective(simt::Kind::kBallot, mask, predicate != 0, 0, 32, SIMT_HERE));
}
inline int __any_sync(unsigned mask, int predicate, SIMT_SITE) {
  return static_cast<int>(
      simt::collective(simt::Kind::kAny, mask, predicate != 0, 0, 32, SIMT_HERE));
}
inline int __all_sync(unsigned mask, int predicate, SIMT_SITE) {
  return static_cast<int>(
      simt::collective(simt::Kind::kAll, mask, predicate != 0, 0, 32, SIMT_HERE));
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, SIMT_SITE) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return static_cast<unsigned>(
      simt::collective(simt::Kind::kMatchAny, mask, bits, 0, 32, SIMT_HERE));
}

#define SIMT_REDUCE(name, type, kind)                                                              \
  inline type __reduce_##name##_sync(unsigned mask, type value, SIMT_SITE) {                       \
    return static_cast<type>(                                                                      \
        simt::collective(simt::Kind::kind, mask, static_cast<unsigned>(value), 0, 32, SIMT_HERE)); \
  }
SIMT_REDUCE(add, unsigned, kReduceAdd)
SIMT_REDUCE(add, int, kReduceAdd)
SIMT_REDUCE(min, unsigned, kReduceMin)
SIMT_REDUCE(min, int, kReduceMinSigned)
SIMT_REDUCE(max, unsigned, kReduceMax)
SIMT_REDUCE(max, int, kReduceMaxSigned)
SIMT_REDUCE(and, unsigned, kReduceAnd)
SIMT_REDUCE(or, unsigned, kReduceOr)
SIMT_REDUCE(xor, unsigned, kReduceXor)
#undef SIMT_REDUCE

// Atomics, fences, waiting

namespace simt {
template <class T, class F>
inline T atomic(T* p, F&& f) {
  schedule_point(false);
  const T old = *p;
  *p = f(old);
  return old;
}
}  // namespace simt

template <class T>
inline T atomicAdd(T* p, std::common_type_t<T> v) {
  return simt::atomic(p, [v](T old) {
    if constexpr (std::is_integral_v<T>) {
      using U = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<U>(old) + static_cast<U>(v));
    } else {
      return old + v;
    }
  });
}
template <class T>
inline T atomicMin(T* p, std::common_type_t<T> v) {
  return simt::atomic(p, [v](T old) { return std::min(old, v); });
}
template <class T>
inline T atomicMax(T* p, std::common_type_t<T> v) {
  return simt::atomic(p, [v](T old) { return std::max(old, v); });
}
template <class T>
inline T atomicOr(T* p, std::common_type_t<T> v) {
  return simt::atomic(p, [v](T old) { return static_cast<T>(old | v); });
}
template <class T>
inline T atomicAnd(T* p, std::common_type_t<T> v) {
  return simt::atomic(p, [v](T old) { return static_cast<T>(old & v); });
}
template <class T>
inline T atomicExch(T* p, std::common_type_t<T> v) {
  return simt::atomic(p, [v](T) { return v; });
}
template <class T>
inline T atomicCAS(T* p, std::common_type_t<T> expected, std::common_type_t<T> v) {
  return simt::atomic(p, [expected, v](T old) { return old == expected ? v : old; });
}

inline void __threadfence_block() { simt::schedule_point(false); }
inline void __threadfence() { simt::schedule_point(false); }
inline void __threadfence_system() { simt::schedule_point(false); }
inline void __nanosleep(unsigned) { simt::schedule_point(true); }
inline long long clock64() { return static_cast<long long>(simt::steps()); }
[[noreturn]] inline void __trap() { simt::fail("__trap()"); }

// Arithmetic; the library is compiled without contraction, so these round as named.

inline unsigned __brev(unsigned v) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (v >> i & 1u) << (31 - i);
  return r;
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
inline int __clzll(long long v) {
  return v ? __builtin_clzll(static_cast<unsigned long long>(v)) : 64;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }

namespace simt {
template <class To, class From>
inline To bits(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &v, sizeof(to));
  return to;
}
}  // namespace simt
inline unsigned __float_as_uint(float v) { return simt::bits<unsigned>(v); }
inline int __float_as_int(float v) { return simt::bits<int>(v); }
inline float __uint_as_float(unsigned v) { return simt::bits<float>(v); }
inline float __int_as_float(int v) { return simt::bits<float>(v); }
inline long long __double_as_longlong(double v) { return simt::bits<long long>(v); }
inline double __longlong_as_double(long long v) { return simt::bits<double>(v); }
// Out of range saturates and NaN gives 0, as on the device.
inline unsigned long long __float2ull_rn(float v) {
  if (!(v > 0.0f)) return 0;
  return v >= 18446744073709551616.0f ? ~0ull : static_cast<unsigned long long>(rintf(v));
}
inline unsigned long long __double2ull_rn(double v) {
  if (!(v > 0.0)) return 0;
  return v >= 18446744073709551616.0 ? ~0ull : static_cast<unsigned long long>(rint(v));
}

template <class T>
inline T __ldg(const T* p) {
  return *p;
}
using std::max;
using std::min;

// Host side

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
};
using cudaStream_t = simt::Stream*;
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone = 0,
  cudaStreamCaptureStatusActive = 1,
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaFree(void* p);

namespace simt {
cudaError_t allocate(void** p, size_t bytes);
cudaError_t allow_dynamic_shared(const void* kernel, int bytes);
// Records an error as <<<>>> does where the configuration is not possible, else enqueues.
void launch(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, Stream* stream,
            std::function<void()> body);
}  // namespace simt

template <class T>
inline cudaError_t cudaMalloc(T** p, size_t bytes) {
  void* raw = nullptr;
  const cudaError_t error = simt::allocate(&raw, bytes);
  *p = static_cast<T*>(raw);
  return error;
}
template <class R, class... Params>
inline cudaError_t cudaFuncSetAttribute(R (*kernel)(Params...), cudaFuncAttribute, int value) {
  return simt::allow_dynamic_shared(reinterpret_cast<const void*>(kernel), value);
}
