// Argument checks shared by every op. One wording everywhere: "spec_kernels::<op>: <argument>:
// expected <what>, got <value>"; the Python face turns messages with this prefix into ValueError.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/host_device.h"

namespace spec_kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class Expected, class Got>
[[noreturn]] inline void fail(const char* op, const char* arg, const Expected& expected,
                              const Got& got) {
  std::ostringstream message;
  message << "spec_kernels::" << op << ": " << arg << ": expected " << expected << ", got " << got;
  throw std::runtime_error(message.str());
}

#define SK_CHECK(cond, op, arg, expected, got)                 \
  do {                                                         \
    if (!(cond)) ::spec_kernels::fail(op, arg, expected, got); \
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

inline void check_same_device(const char* op, const char* arg, const Tensor& t,
                              const Tensor& like) {
  SK_CHECK(t.is_cpu() == like.is_cpu() && t.is_cuda() == like.is_cuda() &&
               t.get_device_index() == like.get_device_index(),
           op, arg, "the device of the first tensor argument", "another device");
}

inline void check_dtype(const char* op, const char* arg, const Tensor& t, ScalarType expected) {
  SK_CHECK(t.scalar_type() == expected, op, arg, torch::headeronly::toString(expected),
           torch::headeronly::toString(t.scalar_type()));
}

inline void check_int(const char* op, const char* arg, const Tensor& t) {
  const ScalarType s = t.scalar_type();
  SK_CHECK(s == ScalarType::Int || s == ScalarType::Long, op, arg, "int32 or int64",
           torch::headeronly::toString(s));
}

inline void check_float(const char* op, const char* arg, const Tensor& t) {
  const ScalarType s = t.scalar_type();
  SK_CHECK(s == ScalarType::Float || s == ScalarType::BFloat16, op, arg, "float32 or bfloat16",
           torch::headeronly::toString(s));
}

inline void check_any_float(const char* op, const char* arg, const Tensor& t) {
  const ScalarType s = t.scalar_type();
  SK_CHECK(s == ScalarType::Float || s == ScalarType::BFloat16 || s == ScalarType::Half, op, arg,
           "float32, bfloat16 or float16", torch::headeronly::toString(s));
}

// Expects exactly these sizes; -1 matches any size.
inline void check_shape(const char* op, const char* arg, const Tensor& t,
                        std::initializer_list<int64_t> expected) {
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
  SK_CHECK(t.dim() == 0 || t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1, op, arg,
           "stride 1 in the last dimension", t.stride(t.dim() - 1));
}

// Where a view's elements stand, in bytes: its dimensions of more than one element, by ascending
// stride, neighbours that form one run merged.
struct Footprint {
  static constexpr int kMaxDims = 12;  // beyond, after merging, a view is taken for tangled

  uintptr_t begin = 0;
  int64_t bytes = 0;  // from the first byte to past the last; 0: no element
  int num_dims = 0;
  bool tangled = false;
  int64_t size[kMaxDims], stride[kMaxDims];

  explicit Footprint(const Tensor& t) : item_(static_cast<int64_t>(t.element_size())) {
    if (t.numel() == 0) return;  // its sizes and strides may be anything
    int64_t run = 1, step = item_, reach = 0;
    for (int64_t d = t.dim() - 1; d >= 0; --d) {
      const int64_t n = t.size(d);
      if (n == 1) continue;
      const int64_t own = t.stride(d) * item_;
      reach += (n - 1) * own;
      if (run > 1 && own != 0 && own == run * step) {
        run *= n;
        continue;
      }
      add(run, step);
      run = n;
      step = own;
    }
    add(run, step);
    begin = reinterpret_cast<uintptr_t>(t.data_ptr());
    bytes = item_ + reach;
  }

  // False where two indices may share an element, as in an expanded tensor.
  bool elements_apart() const {
    if (bytes == 0) return true;
    if (tangled) return false;
    int64_t extent = item_;
    for (int i = 0; i < num_dims; ++i) {
      if (stride[i] < extent) return false;
      extent += (size[i] - 1) * stride[i];
    }
    return true;
  }

  // Bytes covered by the dimensions of a stride below `period`, or 0 if a greater one is no
  // multiple of it.
  int64_t extent_within(int64_t period) const {
    int64_t extent = item_;
    for (int i = 0; i < num_dims; ++i) {
      if (stride[i] < period) {
        extent += (size[i] - 1) * stride[i];
      } else if (stride[i] % period) {
        return 0;
      }
    }
    return extent <= period ? extent : 0;
  }

  bool same_as(const Footprint& o) const {
    bool same =
        !tangled && !o.tangled && begin == o.begin && item_ == o.item_ && num_dims == o.num_dims;
    for (int i = 0; same && i < num_dims; ++i)
      same = size[i] == o.size[i] && stride[i] == o.stride[i];
    return same;
  }

 private:
  void add(int64_t n, int64_t step) {
    if (n == 1) return;
    if (num_dims == kMaxDims) {
      tangled = true;
      return;
    }
    int i = num_dims++;
    for (; i > 0 && stride[i - 1] > step; --i) {
      stride[i] = stride[i - 1];
      size[i] = size[i - 1];
    }
    stride[i] = step;
    size[i] = n;
  }

  int64_t item_;
};

// Never misses an overlap; views that interleave (K and V of one buffer, columns of one matrix) are
// told apart by the stride they share.
inline bool may_overlap(const Footprint& a, const Footprint& b) {
  if (!a.bytes || !b.bytes || a.begin + a.bytes <= b.begin || b.begin + b.bytes <= a.begin)
    return false;
  for (int i = 0; i < a.num_dims && !a.tangled && !b.tangled; ++i) {
    const int64_t period = a.stride[i];
    if (period == 0) continue;
    const int64_t in_a = a.extent_within(period), in_b = b.extent_within(period);
    if (!in_a || !in_b) continue;
    const int64_t gap = static_cast<int64_t>(b.begin - a.begin) % period;
    const int64_t offset = gap < 0 ? gap + period : gap;
    if (offset >= in_a && offset + in_b <= period) return false;
  }
  return true;
}

// A tensor that is written must not hold one element at two indices.
inline void check_elements_apart(const char* op, const char* arg, const Footprint& f) {
  SK_CHECK(f.elements_apart(), op, arg, "rows that do not overlap",
           "strides that repeat an element");
}

struct NamedTensor {
  const char* name;
  const Tensor* tensor;  // null: not given
};

// What an op writes must stand apart from all it reads, or a value that was checked could change
// under its feet.
inline void check_outputs_apart(const char* op, std::initializer_list<NamedTensor> outputs,
                                std::initializer_list<NamedTensor> inputs) {
  std::vector<std::pair<const char*, Footprint>> all;
  all.reserve(outputs.size() + inputs.size());
  for (const NamedTensor& t : outputs) {
    if (t.tensor) all.emplace_back(t.name, Footprint(*t.tensor));
  }
  const size_t num_outputs = all.size();
  for (const NamedTensor& t : inputs) {
    if (t.tensor) all.emplace_back(t.name, Footprint(*t.tensor));
  }
  for (size_t i = 0; i < num_outputs; ++i) {
    check_elements_apart(op, all[i].first, all[i].second);
    for (size_t j = i + 1; j < all.size(); ++j) {
      SK_CHECK(!may_overlap(all[i].second, all[j].second), op, all[i].first,
               std::string("memory apart from ") + all[j].first, "an overlap");
    }
  }
}

// Reads an index tensor of either integer width through one accessor. `data` points at element 0 of
// the view.
struct IntView {
  const void* data = nullptr;
  bool wide = false;

  IntView() = default;
  explicit IntView(const Tensor& t)
      : data(t.data_ptr()), wide(t.scalar_type() == ScalarType::Long) {}

  SK_HOST_DEVICE int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

struct MutableIntView {
  void* data = nullptr;
  bool wide = false;

  MutableIntView() = default;
  explicit MutableIntView(const Tensor& t)
      : data(t.data_ptr()), wide(t.scalar_type() == ScalarType::Long) {}

  SK_HOST_DEVICE bool holds(int64_t value) const {
    return wide || value == static_cast<int32_t>(value);
  }

  SK_HOST_DEVICE void set(int64_t i, int64_t value) const {
    if (wide) {
      static_cast<int64_t*>(data)[i] = value;
    } else {
      static_cast<int32_t*>(data)[i] = static_cast<int32_t>(value);
    }
  }
};

// Element (b, i) of a strided index tensor; of one that is not given, nothing may be read.
struct IntMatrix {
  IntView data;
  int64_t row = 0, column = 0;

  IntMatrix() = default;
  explicit IntMatrix(const Tensor& t)
      : data(t), row(t.stride(0)), column(t.dim() > 1 ? t.stride(1) : 0) {}
  SK_HOST_DEVICE int64_t operator()(int64_t b, int64_t i = 0) const {
    return data[b * row + i * column];
  }
};

struct MutableIntMatrix {
  MutableIntView data;
  int64_t row = 0, column = 0;

  MutableIntMatrix() = default;
  explicit MutableIntMatrix(const Tensor& t)
      : data(t), row(t.stride(0)), column(t.dim() > 1 ? t.stride(1) : 0) {}
  SK_HOST_DEVICE void set(int64_t b, int64_t i, int64_t value) const {
    data.set(b * row + i * column, value);
  }
};

inline const Tensor* given(const std::optional<Tensor>& t) { return t ? &*t : nullptr; }

// Exactly an fp8 cache has scales: [num], positive and finite.
inline void check_cache_scale(const char* op, const char* name, const std::optional<Tensor>& scale,
                              const Tensor& cache, int64_t num) {
  if (cache.scalar_type() != ScalarType::Float8_e4m3fn) {
    SK_CHECK(!scale, op, name, "None for a cache that is not float8_e4m3fn", "a tensor");
    return;
  }
  SK_CHECK(scale, op, name, "a tensor for a cache of float8_e4m3fn", "None");
  check_cpu(op, name, *scale);
  check_dtype(op, name, *scale, ScalarType::Float);
  check_shape(op, name, *scale, {num});
  const float* values = static_cast<const float*>(scale->data_ptr());
  for (int64_t i = 0; i < num; ++i) {
    const float value = values[i * scale->stride(0)];
    SK_CHECK(std::isfinite(value) && value > 0.0f, op,
             (std::string(name) + "[" + std::to_string(i) + "]").c_str(),
             "a positive finite number", value);
  }
}

}  // namespace spec_kernels
