#include "common/rms_norm.h"
#include "common/simd.h"
#include "hidden_capture/hidden_capture.h"

namespace spec_kernels {
namespace SK_ISA {
namespace {

template <class T>
void row(const T* x, T* residual, const T* weight, T* out, T* capture, int64_t hidden, float eps) {
  const int64_t full = hidden / kLanes * kLanes;
  const int64_t rest = hidden - full;
  MeanSquare squares;
  for (int64_t i = 0; i < full; i += kLanes) {
    const F32x16 before = load(residual + i);
    const Packed<T> r(x ? before + load(x + i) : before);
    if (x) store(residual + i, r);
    if (capture) store(capture + i, r);
    squares.add(r.values());
  }
  if (rest) {
    F32x16 r = load_partial(residual + full, rest);
    if (x) {
      r = round_to<T>(r + load_partial(x + full, rest));
      store_partial(residual + full, r, rest);
    }
    if (capture) store_partial(capture + full, r, rest);
    squares.add(r);
  }
  const F32x16 scale = splat(squares.inverse_root(hidden, eps));
  for (int64_t i = 0; i < full; i += kLanes)
    store(out + i, load(residual + i) * scale * load(weight + i));
  if (rest) {
    store_partial(out + full,
                  load_partial(residual + full, rest) * scale * load_partial(weight + full, rest),
                  rest);
  }
}

template <class T>
void rows(const HiddenCaptureArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    row(a.x ? static_cast<const T*>(a.x) + t * a.x_stride : nullptr,
        static_cast<T*>(a.residual) + t * a.residual_stride, static_cast<const T*>(a.weight),
        static_cast<T*>(a.out) + t * a.out_stride,
        a.capture ? static_cast<T*>(a.capture) + t * a.capture_stride : nullptr, a.hidden, a.eps);
  }
}

}  // namespace

void hidden_capture_rows(const HiddenCaptureArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == Float::kBf16) {
    rows<bf16>(args, begin, end);
  } else {
    rows<float>(args, begin, end);
  }
}

}  // namespace SK_ISA
}  // namespace spec_kernels
