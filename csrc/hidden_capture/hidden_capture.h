// residual[t] += x[t]; capture[t] = residual[t]; out[t] = rms_norm(residual[t]) * weight, in one
// pass over each row. The sum is rounded to the residual's dtype first, and what is captured and
// normalised is that rounded value: a later reader of the residual sees exactly what the drafter
// sees. A row's bits depend on nothing but the row.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace spec_kernels {

struct HiddenCaptureArgs {
  const void* x;       // [T, H] or null
  void* residual;      // [T, H]
  const void* weight;  // [H]
  void* out;           // [T, H]
  void* capture;       // [T, H] rows of one slot, or null
  int64_t x_stride, residual_stride, out_stride, capture_stride;  // elements between rows
  int64_t hidden;
  float eps;
  Float dtype;
};

// Rows `begin` and after.
inline HiddenCaptureArgs rows_from(HiddenCaptureArgs a, int64_t begin) {
  const int64_t item = float_size(a.dtype);
  if (a.x) a.x = static_cast<const char*>(a.x) + begin * a.x_stride * item;
  a.residual = static_cast<char*>(a.residual) + begin * a.residual_stride * item;
  a.out = static_cast<char*>(a.out) + begin * a.out_stride * item;
  if (a.capture) a.capture = static_cast<char*>(a.capture) + begin * a.capture_stride * item;
  return a;
}

// On the CPU, by as many threads as torch has for it.
void hidden_capture_cpu(const HiddenCaptureArgs& args, int64_t num_rows);

SK_DECLARE_KERNEL(void hidden_capture_rows(const HiddenCaptureArgs& args, int64_t begin,
                                           int64_t end))

}  // namespace spec_kernels
