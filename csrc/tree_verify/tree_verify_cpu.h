// The walk on the CPU, for `tree_verify` and for what begins with it.
#pragma once

#include "tree_verify/tree_verify_args.h"

namespace spec_kernels {

// Raises before anything is written where a parameter is out of range.
void tree_verify_on_cpu(const char* op, const TreeVerifyArgs& args);

}  // namespace spec_kernels
