// What every kernel does that adds to a residual row and normalises it, so that a fused form gives
// the bits of the separate one.
//
// The squares of a row are added in one order. A row is cut into segments of 128 packets; a thread
// adds the squares of a packet in order, the 32 packets of a warp are added as a butterfly, the
// four warps of a segment in order, and the segments of the row in order.
#pragma once

#include "common/packet.cuh"
#include "hidden_capture/hidden_capture.h"

namespace spec_kernels {
namespace hidden {

constexpr int kSegmentPackets = 128;
constexpr int kSegmentWarps = kSegmentPackets / 32;

struct Params {
  HiddenCaptureArgs a;
  // Whether every full packet of the tensor's rows stands at a multiple of 16 bytes.
  bool x_aligned, residual_aligned, weight_aligned, out_aligned, capture_aligned;
};

inline Params params(const HiddenCaptureArgs& a) {
  const auto aligned = [&](const void* data, int64_t row_stride) {
    constexpr int64_t kBytes = sizeof(Packet);
    return reinterpret_cast<uintptr_t>(data) % kBytes == 0 &&
           row_stride * float_size(a.dtype) % kBytes == 0;
  };
  return {a,
          aligned(a.x, a.x_stride),
          aligned(a.residual, a.residual_stride),
          aligned(a.weight, 0),
          aligned(a.out, a.out_stride),
          aligned(a.capture, a.capture_stride)};
}

// `num` elements of a row, from a column on.
struct Place {
  int64_t row, column;
  int num;
};

template <class T>
__device__ inline const T* at(const void* tensor, int64_t row_stride, const Place& place) {
  return static_cast<const T*>(tensor) + place.row * row_stride + place.column;
}
template <class T>
__device__ inline T* at(void* tensor, int64_t row_stride, const Place& place) {
  return static_cast<T*>(tensor) + place.row * row_stride + place.column;
}

template <class T>
__device__ inline Packet residual_of(const Params& p, const Place& place) {
  return load_elements(at<T>(p.a.residual, p.a.residual_stride, place), place.num,
                       p.residual_aligned);
}

// residual += x, rounded: later readers of the residual see what is captured and normalised.
template <class T>
__device__ inline Packet add(const Params& p, const Place& place, const Packet& residual,
                             const Packet& x) {
  float values[kPerPacket<T>];
#pragma unroll
  for (int i = 0; i < kPerPacket<T>; ++i)
    values[i] = to_f32<T>(element<T>(residual, i)) + to_f32<T>(element<T>(x, i));
  const Packet sum = pack<T>(values);
  store_elements(at<T>(p.a.residual, p.a.residual_stride, place), place.num, p.residual_aligned,
                 sum);
  return sum;
}

template <class T>
__device__ inline void capture(const Params& p, const Place& place, const Packet& row) {
  if (!p.a.capture) return;
  store_elements(at<T>(p.a.capture, p.a.capture_stride, place), place.num, p.capture_aligned, row);
}

// Elements beyond the row are zeros.
template <class T>
__device__ inline float packet_squares(const Packet& packet) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerPacket<T>; ++i) {
    const float v = to_f32<T>(element<T>(packet, i));
    squares = fmaf(v, v, squares);
  }
  return squares;
}

// Of all lanes, the same on each.
__device__ inline float warp_squares(float squares) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, mask);
  return squares;
}

__device__ inline float segment_squares(const float* warps) {
  float squares = warps[0];
#pragma unroll
  for (int w = 1; w < kSegmentWarps; ++w) squares += warps[w];
  return squares;
}

__device__ inline float inverse_root(const Params& p, float squares) {
  return 1.0f / sqrtf(squares / static_cast<float>(p.a.hidden) + p.a.eps);
}

template <class T>
__device__ inline void write_out(const Params& p, const Place& place, const Packet& row,
                                 float scale) {
  const Packet weight = load_elements(at<T>(p.a.weight, 0, {0, place.column, place.num}), place.num,
                                      p.weight_aligned);
  float values[kPerPacket<T>];
#pragma unroll
  for (int i = 0; i < kPerPacket<T>; ++i)
    values[i] = to_f32<T>(element<T>(row, i)) * scale * to_f32<T>(element<T>(weight, i));
  store_elements(at<T>(p.a.out, p.a.out_stride, place), place.num, p.out_aligned, pack<T>(values));
}

}  // namespace hidden

// On the caller's stream, in the name of `op`.
void hidden_capture_cuda(const char* op, const HiddenCaptureArgs& args, int64_t num_rows,
                         int32_t device);

}  // namespace spec_kernels
