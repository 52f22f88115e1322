// The caller's CUDA stream and device guard, through the stable C shims.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/macros.h>

#include <cstdint>
#include <stdexcept>
#include <string>

// Weak, so that the library also loads beside a torch that was built without CUDA; no kernel can be
// reached there.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                             void** ret_stream)
    __attribute__((weak));

namespace spec_kernels {

// torch's own STD_CUDA_CHECK needs symbols that a CPU build of torch lacks.
inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("spec_kernels: ") + what + ": " + cudaGetErrorString(error));
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

}  // namespace spec_kernels
