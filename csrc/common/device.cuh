// The caller's CUDA stream and device guard, through the stable C shims.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/macros.h>

// Weak, so that the library also loads beside a torch that was built without CUDA; no kernel can be reached there.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream) __attribute__((weak));

namespace spec_kernels {

inline cudaStream_t current_stream(int32_t device_index) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return static_cast<cudaStream_t>(stream);
}

// Makes `device` current for the scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device) {
    STD_CUDA_CHECK(cudaGetDevice(&previous_));
    if (previous_ != device) STD_CUDA_CHECK(cudaSetDevice(device));
  }
  ~DeviceGuard() { cudaSetDevice(previous_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
};

}  // namespace spec_kernels
