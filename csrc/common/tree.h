// What the ops on draft trees agree on.
#pragma once

#include <cstdint>

namespace spec_kernels {

constexpr int64_t kMaxNodes = 1024;

}  // namespace spec_kernels
