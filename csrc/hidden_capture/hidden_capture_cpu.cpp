#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>

#include "hidden_capture/hidden_capture_args.h"

namespace spec_kernels {
namespace {

constexpr char kOp[] = "hidden_capture";
constexpr int64_t kElementsPerTask = 32768;  // below this, waking a thread costs more

void hidden_capture(std::optional<Tensor> x, Tensor residual, Tensor weight, double eps, Tensor out,
                    std::optional<Tensor> capture, int64_t slot) {
  check_cpu(kOp, "residual", residual);
  const HiddenCaptureArgs args =
      hidden_capture_args(kOp, x, residual, weight, eps, out, capture, slot);
  hidden_capture_cpu(args, residual.size(0));
}

}  // namespace

void hidden_capture_cpu(const HiddenCaptureArgs& args, int64_t num_rows) {
  if (num_rows == 0 || args.hidden == 0) return;
  const auto kernel = SK_KERNEL(hidden_capture_rows);
  torch::stable::parallel_for(0, num_rows, std::max<int64_t>(1, kElementsPerTask / args.hidden),
                              [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

STABLE_TORCH_LIBRARY_IMPL(spec_kernels, CPU, m) {
  m.impl("hidden_capture", TORCH_BOX(&hidden_capture));
}

}  // namespace spec_kernels
