// What every CUDA source stands on: launches, shared memory, the caller's stream and device, and
// the values that only a kernel can check.
//
// The same sources are compiled for the host and run on an emulated machine (tests/cuda_on_host),
// whose cuda_runtime.h defines SK_CUDA_ON_HOST. What differs is here and nowhere else.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "common/check.h"

// Weak, so that the library also loads beside a torch that was built without CUDA; no kernel can be
// reached there.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                             void** ret_stream)
    __attribute__((weak));

// SK_SHARED(float, partial, [kWarps]) declares an array in shared memory, SK_SHARED(int, count) a
// scalar, SK_DYNAMIC_SHARED(char, bytes) a pointer to what the launch asked for, aligned to 16.
// SK_CUDA_LIBRARY_IMPL(m) { m.impl(...) } registers.
#if defined(SK_CUDA_ON_HOST)
#define SK_SHARED(type, name, ...) SIMT_SHARED(type, name, __VA_ARGS__)
#define SK_DYNAMIC_SHARED(type, name) \
  type* const name = static_cast<type*>(::simt::dynamic_shared())
#define SK_CUDA_LIBRARY_IMPL(m) STABLE_TORCH_LIBRARY_IMPL(spec_kernels_cuda_on_host, CPU, m)
#else
#define SK_SHARED(type, name, ...) __shared__ type name __VA_ARGS__
#define SK_DYNAMIC_SHARED(type, name)                                \
  extern __shared__ __align__(16) unsigned char sk_dynamic_shared[]; \
  type* const name = reinterpret_cast<type*>(sk_dynamic_shared)
#define SK_CUDA_LIBRARY_IMPL(m) STABLE_TORCH_LIBRARY_IMPL(spec_kernels, CUDA, m)
#endif

namespace spec_kernels {

// torch's own STD_CUDA_CHECK needs symbols that a CPU build of torch lacks.
inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("spec_kernels: ") + what + ": " + cudaGetErrorString(error));
}

inline void check_cuda_tensor(const char* op, const char* arg, const Tensor& t) {
#if defined(SK_CUDA_ON_HOST)
  check_cpu(op, arg, t);
#else
  SK_CHECK(t.is_cuda(), op, arg, "a CUDA tensor", "another device");
#endif
}

inline cudaStream_t current_stream(int32_t device_index) {
  if (!aoti_torch_get_current_cuda_stream)
    throw std::runtime_error("spec_kernels: this torch was built without CUDA");
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return static_cast<cudaStream_t>(stream);
}

// Makes `device` current for the scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ != device) check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() { cudaSetDevice(previous_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
};

// A grid of one block for each of `num`, which is a size of argument `arg`.
inline dim3 one_block_each(const char* op, const char* arg, int64_t num) {
  SK_CHECK(num <= 0x7FFFFFFF, op, arg, "at most 2147483647 of them", num);
  return dim3(static_cast<unsigned>(num));
}

// kernel<<<grid, block, shared_bytes, stream>>>(args...); raises where the launch itself is
// refused. `what` names the op.
template <class... Params, class... Args>
void launch_kernel(const char* what, void (*kernel)(Params...), dim3 grid, dim3 block,
                   size_t shared_bytes, cudaStream_t stream, const Args&... args) {
  // Beyond 48 KiB, static arrays included, a kernel must be allowed its shared memory. Static
  // arrays stay within 40 KiB (tests/cuda_on_host/test_budgets.py).
  constexpr size_t kAlwaysAllowed = 8 << 10;
  if (shared_bytes > kAlwaysAllowed) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared_bytes)),
               what);
  }
#if defined(SK_CUDA_ON_HOST)
  simt::launch(reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, stream,
               [=] { kernel(args...); });
#else
  // clang-format off: it would part the brackets
  kernel<<<grid, block, shared_bytes, stream>>>(args...);
  // clang-format on
#endif
  check_cuda(cudaGetLastError(), what);
}

// A 32-bit word that another block or device writes meanwhile: read or written whole, every time.
__device__ inline uint32_t load_relaxed_system(const uint32_t* p) {
#if defined(SK_CUDA_ON_HOST)
  simt::schedule_point(true);
  return *p;
#else
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
#endif
}

__device__ inline void store_relaxed_system(uint32_t* p, uint32_t v) {
#if defined(SK_CUDA_ON_HOST)
  simt::schedule_point(false);
  *p = v;
#else
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
#endif
}

// A value out of range that a kernel met and took for absent.
struct Fault {
  int32_t code;   // the op's own, not 0
  int32_t index;  // which request, tensor or entry, as the op means it
  int64_t bound, got;
};

// Keeps the first of a launch; `record` is null unless somebody asked.
__device__ inline void report(Fault* record, int32_t code, int64_t index, int64_t bound,
                              int64_t got) {
  if (record && atomicCAS(&record->code, 0, code) == 0) {
    record->index = static_cast<int32_t>(index);
    record->bound = bound;
    record->got = got;
  }
}

// SPEC_KERNELS_CHECK=1: waits for the kernel and lets the op raise what it reported. Otherwise, and
// while a graph is captured, nothing is recorded and nobody waits.
class FaultCheck {
 public:
  FaultCheck(const char* op, cudaStream_t stream) : op_(op), stream_(stream) {
    const char* wanted = std::getenv("SPEC_KERNELS_CHECK");
    if (!wanted || std::strcmp(wanted, "1") != 0) return;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(stream, &status), op);
    if (status != cudaStreamCaptureStatusNone) return;
    check_cuda(cudaMalloc(&record_, sizeof(Fault)), op);
    check_cuda(cudaMemsetAsync(record_, 0, sizeof(Fault), stream), op);
  }
  ~FaultCheck() {
    // Even of a null pointer it may break a capture that is under way.
    if (record_) cudaFree(record_);
  }
  FaultCheck(const FaultCheck&) = delete;
  FaultCheck& operator=(const FaultCheck&) = delete;

  Fault* record() const { return record_; }

  // Calls `raise(fault)` if there is one.
  template <class F>
  void finish(F&& raise) const {
    if (!record_) return;
    Fault fault{};
    check_cuda(cudaMemcpyAsync(&fault, record_, sizeof(Fault), cudaMemcpyDeviceToHost, stream_),
               op_);
    check_cuda(cudaStreamSynchronize(stream_), op_);
    if (fault.code != 0) raise(fault);
  }

 private:
  const char* op_;
  cudaStream_t stream_;
  Fault* record_ = nullptr;
};

}  // namespace spec_kernels
