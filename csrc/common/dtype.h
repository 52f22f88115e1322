// Element types of the CPU ops, as a plain enum that crosses into the kernels compiled per
// instruction set.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

namespace spec_kernels {

enum class Float { kF32, kBf16, kF16, kF8 };  // kF8: float8_e4m3fn

inline Float float_kind(torch::headeronly::ScalarType s) {
  switch (s) {
    case torch::headeronly::ScalarType::BFloat16:
      return Float::kBf16;
    case torch::headeronly::ScalarType::Half:
      return Float::kF16;
    case torch::headeronly::ScalarType::Float8_e4m3fn:
      return Float::kF8;
    default:
      return Float::kF32;
  }
}

inline int64_t float_size(Float f) { return f == Float::kF32 ? 4 : f == Float::kF8 ? 1 : 2; }

}  // namespace spec_kernels
