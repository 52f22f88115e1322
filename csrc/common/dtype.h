// Element types of the CPU ops, as a plain enum that crosses into the kernels compiled per
// instruction set.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

namespace spec_kernels {

enum class Float { kF32, kBf16 };

inline Float float_kind(torch::headeronly::ScalarType s) {
  return s == torch::headeronly::ScalarType::BFloat16 ? Float::kBf16 : Float::kF32;
}

inline int64_t float_size(Float f) { return f == Float::kBf16 ? 2 : 4; }

}  // namespace spec_kernels
