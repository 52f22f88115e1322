// Names of elements in messages: name[i], name[i, j].
#pragma once

#include <cstdint>
#include <string>

namespace spec_kernels {

inline std::string indexed(const char* name, int64_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

inline std::string indexed(const char* name, int64_t i, int64_t j) {
  return std::string(name) + "[" + std::to_string(i) + ", " + std::to_string(j) + "]";
}

}  // namespace spec_kernels
