// One block a row. The row stays in registers between the sum of squares and the scaled store, so
// HBM sees each element once for every tensor it belongs to.
//
// [4, 7168] bf16 with capture: 5 x 57 KB a call and the weight, 0.2 us at 1.8 TB/s; on paper two
// dependent reads, a barrier and the launch make it about 3 us.
#include <cuda_bf16.h>

#include <optional>

#include "common/device.cuh"
#include "hidden_capture/hidden_capture_args.h"

namespace spec_kernels {
namespace {

constexpr char kOp[] = "hidden_capture";
constexpr int kThreads = 256;
constexpr int kMaxPerThread = 64;  // hidden <= 16384

__device__ inline float to_f32(float v) { return v; }
__device__ inline float to_f32(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ inline void put(float* p, float v) { *p = v; }
__device__ inline void put(__nv_bfloat16* p, float v) { *p = __float2bfloat16_rn(v); }

template <class T, int kPerThread>
__global__ void __launch_bounds__(kThreads) hidden_capture_kernel(HiddenCaptureArgs a) {
  const int64_t t = blockIdx.x;
  const T* x = static_cast<const T*>(a.x);
  T* residual = static_cast<T*>(a.residual) + t * a.residual_stride;
  T* capture = static_cast<T*>(a.capture);
  const T* weight = static_cast<const T*>(a.weight);
  T* out = static_cast<T*>(a.out) + t * a.out_stride;
  const int hidden = static_cast<int>(a.hidden);

  float values[kPerThread];
  float squares = 0.0f;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int i = threadIdx.x + k * kThreads;
    values[k] = 0.0f;
    if (i < hidden) {
      float r = to_f32(residual[i]);
      if (x) {
        r += to_f32(x[t * a.x_stride + i]);
        put(residual + i, r);
        if (!mutant("hidden_capture_unrounded")) r = to_f32(residual[i]);
      }
      if (capture) put(capture + t * a.capture_stride + i, r);
      values[k] = r;
      squares = fmaf(r, r, squares);
    }
  }
  // Butterfly within a warp, then over warps: one order for every row and grid.
  SK_SHARED(float, partial, [kThreads / 32]);
  for (int mask = 16; mask > 0; mask /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, mask);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = squares;
  if (!mutant("hidden_capture_barrier")) __syncthreads();
  float total = 0.0f;
  for (int w = 0; w < kThreads / 32; ++w) total += partial[w];
  const float scale = 1.0f / sqrtf(total / static_cast<float>(hidden) + a.eps);
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int i = threadIdx.x + k * kThreads;
    if (i < hidden) put(out + i, values[k] * scale * to_f32(weight[i]));
  }
}

template <class T>
void launch(const HiddenCaptureArgs& args, int64_t num_rows, cudaStream_t stream) {
  const int per_thread = static_cast<int>((args.hidden + kThreads - 1) / kThreads);
  const dim3 grid = one_block_each(kOp, "residual", num_rows);
  const auto kernel = per_thread <= 4    ? &hidden_capture_kernel<T, 4>
                      : per_thread <= 16 ? &hidden_capture_kernel<T, 16>
                      : per_thread <= 32 ? &hidden_capture_kernel<T, 32>
                                         : &hidden_capture_kernel<T, kMaxPerThread>;
  launch_kernel(kOp, kernel, grid, kThreads, 0, stream, args);
}

void hidden_capture(std::optional<Tensor> x, Tensor residual, Tensor weight, double eps, Tensor out,
                    std::optional<Tensor> capture, int64_t slot) {
  check_cuda_tensor(kOp, "residual", residual);
  const HiddenCaptureArgs args =
      hidden_capture_args(kOp, x, residual, weight, eps, out, capture, slot);
  SK_CHECK(args.hidden <= kThreads * kMaxPerThread, kOp, "residual", "at most 16384 columns",
           args.hidden);
  const int64_t num_rows = residual.size(0);
  if (num_rows == 0 || args.hidden == 0) return;
  const DeviceGuard guard(residual.get_device_index());
  const cudaStream_t stream = current_stream(residual.get_device_index());
  if (args.dtype == Float::kBf16) {
    launch<__nv_bfloat16>(args, num_rows, stream);
  } else {
    launch<float>(args, num_rows, stream);
  }
}

}  // namespace

SK_CUDA_LIBRARY_IMPL(m) { m.impl("hidden_capture", TORCH_BOX(&hidden_capture)); }

}  // namespace spec_kernels
