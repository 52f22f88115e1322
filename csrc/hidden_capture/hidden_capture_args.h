// Validation shared by the CPU and CUDA registrations: tensors in, plain pointers and strides out.
#pragma once

#include <initializer_list>
#include <optional>

#include "common/check.h"
#include "hidden_capture/hidden_capture.h"

namespace spec_kernels {

inline HiddenCaptureArgs hidden_capture_args(const char* op, const std::optional<Tensor>& x,
                                             const Tensor& residual, const Tensor& weight,
                                             double eps, const Tensor& out,
                                             const std::optional<Tensor>& capture, int64_t slot,
                                             const char* x_name = "x") {
  check_float(op, "residual", residual);
  check_shape(op, "residual", residual, {-1, -1});
  check_last_dim(op, "residual", residual);
  const int64_t num_rows = residual.size(0);
  const int64_t hidden = residual.size(1);
  const auto check_operand = [&](const char* name, const Tensor& t,
                                 std::initializer_list<int64_t> shape) {
    check_same_device(op, name, t, residual);
    check_dtype(op, name, t, residual.scalar_type());
    check_shape(op, name, t, shape);
    check_last_dim(op, name, t);
  };
  check_operand("weight", weight, {hidden});
  check_operand("out", out, {num_rows, hidden});
  if (x) check_operand(x_name, *x, {num_rows, hidden});
  SK_CHECK(residual.numel() == 0 || out.data_ptr() != residual.data_ptr(), op, "out",
           "a tensor other than residual", "the same memory");

  HiddenCaptureArgs args{};
  args.dtype = float_kind(residual.scalar_type());
  if (capture) {
    check_operand("capture", *capture, {-1, -1, hidden});
    SK_CHECK(capture->size(0) >= num_rows, op, "capture", "at least as many rows as residual",
             shape_string(*capture));
    SK_CHECK(slot >= 0 && slot < capture->size(1), op, "slot",
             "0 <= slot < " + std::to_string(capture->size(1)), slot);
    args.capture = static_cast<char*>(capture->data_ptr()) +
                   slot * capture->stride(1) * float_size(args.dtype);
    args.capture_stride = capture->stride(0);
  }
  // Each row is read before it is written, so x may be out or residual itself.
  const Tensor* apart_x = x ? &*x : nullptr;
  if (x && (Footprint(*x).same_as(Footprint(out)) || Footprint(*x).same_as(Footprint(residual))))
    apart_x = nullptr;
  check_outputs_apart(
      op, {{"residual", &residual}, {"out", &out}, {"capture", capture ? &*capture : nullptr}},
      {{x_name, apart_x}, {"weight", &weight}});
  args.x = x ? x->data_ptr() : nullptr;
  args.x_stride = x ? x->stride(0) : 0;
  args.residual = residual.data_ptr();
  args.residual_stride = residual.stride(0);
  args.weight = weight.data_ptr();
  args.out = out.data_ptr();
  args.out_stride = out.stride(0);
  args.hidden = hidden;
  args.eps = static_cast<float>(eps);
  return args;
}

}  // namespace spec_kernels
