#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "common/check.h"
#include "merge_states/merge_states.h"

namespace spec_kernels {
namespace {

constexpr char kOp[] = "merge_states";
constexpr int64_t kElementsPerTask = 32768;  // below this, waking a thread costs more

void merge_states(Tensor outs, Tensor lses, Tensor out, Tensor lse) {
  check_cpu(kOp, "outs", outs);
  check_any_float(kOp, "outs", outs);
  check_shape(kOp, "outs", outs, {-1, -1, -1, -1, -1});
  check_last_dim(kOp, "outs", outs);
  const int64_t num_parts = outs.size(0), num_batch = outs.size(1), num_rows = outs.size(2),
                num_heads = outs.size(3), dim = outs.size(4);
  SK_CHECK(num_parts <= kMaxParts, kOp, "outs", "at most " + std::to_string(kMaxParts) + " parts",
           num_parts);
  check_same_device(kOp, "lses", lses, outs);
  check_dtype(kOp, "lses", lses, ScalarType::Float);
  check_shape(kOp, "lses", lses, {num_parts, num_batch, num_rows, num_heads});
  check_same_device(kOp, "out", out, outs);
  check_dtype(kOp, "out", out, outs.scalar_type());
  check_shape(kOp, "out", out, {num_batch, num_rows, num_heads, dim});
  check_last_dim(kOp, "out", out);
  check_same_device(kOp, "lse", lse, outs);
  check_dtype(kOp, "lse", lse, ScalarType::Float);
  check_shape(kOp, "lse", lse, {num_batch, num_rows, num_heads});
  check_outputs_apart(kOp, {{"out", &out}, {"lse", &lse}}, {{"outs", &outs}, {"lses", &lses}});
  if (num_batch == 0 || num_rows == 0 || num_heads == 0) return;

  MergeStatesArgs args{};
  args.outs = outs.data_ptr();
  args.lses = static_cast<const float*>(lses.data_ptr());
  args.out = out.data_ptr();
  args.lse = static_cast<float*>(lse.data_ptr());
  for (int i = 0; i < 4; ++i) {
    args.outs_stride[i] = outs.stride(i);
    args.lses_stride[i] = lses.stride(i);
  }
  for (int i = 0; i < 3; ++i) {
    args.out_stride[i] = out.stride(i);
    args.lse_stride[i] = lse.stride(i);
  }
  args.num_parts = num_parts;
  args.num_rows = num_rows;
  args.num_heads = num_heads;
  args.dim = dim;
  args.dtype = float_kind(outs.scalar_type());
  const auto kernel = SK_KERNEL(merge_states_rows);
  const int64_t per_row = std::max<int64_t>(1, num_parts * (dim + 16));
  torch::stable::parallel_for(0, num_batch * num_rows * num_heads,
                              std::max<int64_t>(1, kElementsPerTask / per_row),
                              [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spec_kernels, CPU, m) {
  m.impl("merge_states", TORCH_BOX(&merge_states));
}

}  // namespace spec_kernels
