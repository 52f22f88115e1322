// One block a row; each half of it takes every second segment. The row stays in registers between
// the sum of squares and the scaled store, so HBM sees each element once for every tensor it
// belongs to.
//
// [4, 7168] bf16 with capture: 5 x 57 KB a call and the weight, 0.2 us at 1.8 TB/s; on paper two
// dependent reads, a barrier and the launch make it about 3 us.
#include <optional>

#include "hidden_capture/hidden_capture.cuh"
#include "hidden_capture/hidden_capture_args.h"

namespace spec_kernels {
namespace {

constexpr int kThreads = 2 * hidden::kSegmentPackets;
constexpr int kMaxHidden = 16384;

template <class T>
constexpr int kSegmentElements = hidden::kSegmentPackets * kPerPacket<T>;

template <class T, int kPackets>
__global__ void __launch_bounds__(kThreads) hidden_capture_kernel(const hidden::Params p) {
  SK_SHARED(float, partial, [2 * kPackets * hidden::kSegmentWarps]);
  const int hidden = static_cast<int>(p.a.hidden);
  const int half = static_cast<int>(threadIdx.x) / hidden::kSegmentPackets;
  const int first = static_cast<int>(threadIdx.x) % hidden::kSegmentPackets * kPerPacket<T>;
  Packet rows[kPackets];
#pragma unroll
  for (int k = 0; k < kPackets; ++k) {
    const int segment = 2 * k + half;
    const int column = segment * kSegmentElements<T> + first;
    const int num = max(0, min(hidden - column, kPerPacket<T>));
    const hidden::Place place{static_cast<int64_t>(blockIdx.x), column, num};
    rows[k] = filled(0);
    if (num > 0) {
      const Packet residual = hidden::residual_of<T>(p, place);
      rows[k] = residual;
      if (p.a.x) {
        rows[k] = hidden::add<T>(
            p, place, residual,
            load_elements(hidden::at<T>(p.a.x, p.a.x_stride, place), num, p.x_aligned));
      }
      hidden::capture<T>(p, place, mutant("hidden_capture_before") ? residual : rows[k]);
    }
    const float squares = hidden::warp_squares(hidden::packet_squares<T>(rows[k]));
    if (threadIdx.x % 32 == 0)
      partial[segment * hidden::kSegmentWarps + first / (32 * kPerPacket<T>)] = squares;
  }
  if (!mutant("hidden_capture_barrier")) __syncthreads();
  const int num_segments = (hidden + kSegmentElements<T> - 1) / kSegmentElements<T>;
  float total = 0.0f;
  for (int s = 0; s < num_segments; ++s)
    total += hidden::segment_squares(partial + s * hidden::kSegmentWarps);
  const float scale = hidden::inverse_root(p, total);
#pragma unroll
  for (int k = 0; k < kPackets; ++k) {
    const int column = (2 * k + half) * kSegmentElements<T> + first;
    const int num = min(hidden - column, kPerPacket<T>);
    if (num > 0)
      hidden::write_out<T>(p, {static_cast<int64_t>(blockIdx.x), column, num}, rows[k], scale);
  }
}

template <class T>
void launch(const char* op, const HiddenCaptureArgs& args, int64_t num_rows, cudaStream_t stream) {
  constexpr int kMaxPackets = kMaxHidden / (kThreads * kPerPacket<T>);
  const int64_t packets = (args.hidden + kThreads * kPerPacket<T> - 1) / (kThreads * kPerPacket<T>);
  const dim3 grid = one_block_each(op, "residual", num_rows);
  const auto kernel = packets <= kMaxPackets / 8   ? &hidden_capture_kernel<T, kMaxPackets / 8>
                      : packets <= kMaxPackets / 4 ? &hidden_capture_kernel<T, kMaxPackets / 4>
                      : packets <= kMaxPackets / 2 ? &hidden_capture_kernel<T, kMaxPackets / 2>
                                                   : &hidden_capture_kernel<T, kMaxPackets>;
  launch_kernel(op, kernel, grid, kThreads, 0, stream, hidden::params(args));
}

void hidden_capture(std::optional<Tensor> x, Tensor residual, Tensor weight, double eps, Tensor out,
                    std::optional<Tensor> capture, int64_t slot) {
  const char* op = "hidden_capture";
  check_cuda_tensor(op, "residual", residual);
  const HiddenCaptureArgs args =
      hidden_capture_args(op, x, residual, weight, eps, out, capture, slot);
  hidden_capture_cuda(op, args, residual.size(0), residual.get_device_index());
}

}  // namespace

void hidden_capture_cuda(const char* op, const HiddenCaptureArgs& args, int64_t num_rows,
                         int32_t device) {
  SK_CHECK(args.hidden <= kMaxHidden, op, "residual", "at most 16384 columns", args.hidden);
  if (num_rows == 0 || args.hidden == 0) return;
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  if (args.dtype == Float::kBf16) {
    launch<__nv_bfloat16>(op, args, num_rows, stream);
  } else {
    launch<float>(op, args, num_rows, stream);
  }
}

SK_CUDA_LIBRARY_IMPL(m) { m.impl("hidden_capture", TORCH_BOX(&hidden_capture)); }

}  // namespace spec_kernels
