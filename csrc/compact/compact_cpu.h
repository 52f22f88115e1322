// The move on the CPU, for `compact` and for what ends in it.
#pragma once

#include "compact/compact_args.h"

namespace spec_kernels {

// Raises before the first byte moves where an index is out of range.
void compact_on_cpu(const CompactArgs& args);

}  // namespace spec_kernels
