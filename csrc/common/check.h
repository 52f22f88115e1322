// Argument checks shared by every op. One wording everywhere: "spec_kernels::<op>: <argument>: expected <what>, got
// <value>"; the Python face turns messages with this prefix into ValueError.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace spec_kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class Expected, class Got>
[[noreturn]] inline void fail(const char* op, const char* arg, const Expected& expected, const Got& got) {
  std::ostringstream message;
  message << "spec_kernels::" << op << ": " << arg << ": expected " << expected << ", got " << got;
  throw std::runtime_error(message.str());
}

#define SK_CHECK(cond, op, arg, expected, got)                  \
  do {                                                          \
    if (!(cond)) ::spec_kernels::fail(op, arg, expected, got);  \
  } while (0)

inline std::string shape_string(const Tensor& t) {
  std::ostringstream out;
  out << "[";
  for (int64_t i = 0; i < t.dim(); ++i) out << (i ? ", " : "") << t.size(i);
  out << "]";
  return out.str();
}

inline void check_cpu(const char* op, const char* arg, const Tensor& t) {
  SK_CHECK(t.is_cpu(), op, arg, "a CPU tensor", "another device");
}

inline void check_same_device(const char* op, const char* arg, const Tensor& t, const Tensor& like) {
  SK_CHECK(t.is_cpu() == like.is_cpu() && t.is_cuda() == like.is_cuda() && t.get_device_index() == like.get_device_index(), op,
           arg, "the device of the first tensor argument", "another device");
}

inline void check_dtype(const char* op, const char* arg, const Tensor& t, ScalarType expected) {
  SK_CHECK(t.scalar_type() == expected, op, arg, torch::headeronly::toString(expected),
           torch::headeronly::toString(t.scalar_type()));
}

inline void check_int(const char* op, const char* arg, const Tensor& t) {
  const ScalarType s = t.scalar_type();
  SK_CHECK(s == ScalarType::Int || s == ScalarType::Long, op, arg, "int32 or int64", torch::headeronly::toString(s));
}

inline void check_float(const char* op, const char* arg, const Tensor& t) {
  const ScalarType s = t.scalar_type();
  SK_CHECK(s == ScalarType::Float || s == ScalarType::BFloat16, op, arg, "float32 or bfloat16",
           torch::headeronly::toString(s));
}

// Expects exactly these sizes; -1 matches any size.
inline void check_shape(const char* op, const char* arg, const Tensor& t, std::initializer_list<int64_t> expected) {
  bool same = t.dim() == static_cast<int64_t>(expected.size());
  int64_t i = 0;
  for (int64_t e : expected) {
    if (!same) break;
    same = e < 0 || t.size(i) == e;
    ++i;
  }
  if (same) return;
  std::ostringstream want;
  want << "shape [";
  i = 0;
  for (int64_t e : expected) {
    want << (i++ ? ", " : "");
    if (e < 0) {
      want << "*";
    } else {
      want << e;
    }
  }
  want << "]";
  fail(op, arg, want.str(), shape_string(t));
}

inline void check_contiguous(const char* op, const char* arg, const Tensor& t) {
  SK_CHECK(t.is_contiguous(), op, arg, "a contiguous tensor", "strided " + shape_string(t));
}

// Rows may be strided; elements of the last dimension must be adjacent.
inline void check_last_dim(const char* op, const char* arg, const Tensor& t) {
  SK_CHECK(t.dim() == 0 || t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1, op, arg, "stride 1 in the last dimension",
           t.stride(t.dim() - 1));
}

// Rows [T, H] that are written must not lie upon each other, as those of an expanded tensor do.
inline void check_rows_apart(const char* op, const char* arg, const Tensor& t) {
  SK_CHECK(t.size(0) <= 1 || t.stride(0) >= t.size(t.dim() - 1), op, arg, "rows that do not overlap",
           "row stride " + std::to_string(t.stride(0)));
}

// Reads an index tensor of either integer width through one accessor. `data` points at element 0 of the view.
struct IntView {
  const void* data = nullptr;
  bool wide = false;

  IntView() = default;
  explicit IntView(const Tensor& t) : data(t.data_ptr()), wide(t.scalar_type() == ScalarType::Long) {}

  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

struct MutableIntView {
  void* data = nullptr;
  bool wide = false;

  MutableIntView() = default;
  explicit MutableIntView(const Tensor& t) : data(t.data_ptr()), wide(t.scalar_type() == ScalarType::Long) {}

  void set(int64_t i, int64_t value) const {
    if (wide) {
      static_cast<int64_t*>(data)[i] = value;
    } else {
      static_cast<int32_t*>(data)[i] = static_cast<int32_t>(value);
    }
  }
};

}  // namespace spec_kernels
