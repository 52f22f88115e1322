// The groups of this process, by the address of the slab: what an op may know of its peers. No
// address of a peer ever comes from a call's arguments.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "pcie_allreduce/slab.h"

namespace spec_kernels {
namespace slab {

struct Group {
  Attach attach;
  Layout layout;
  bool bound = false;  // to `stream`, by the first eager call or by use_stream
  cudaStream_t stream = nullptr;
#if defined(SK_MUTANTS)
  uint32_t num_launches = 0;
#endif

  // The algorithm and the number of blocks for a message of `bytes`.
  const Entry& entry(uint64_t bytes) const;
};

// The group of `slab`, or an error naming `op`; its failure, if it has failed, is raised.
Group& group_of(const char* op, const void* slab, int64_t rank, int64_t world_size);

// The caller's stream on `device`, once it is known to be the group's.
cudaStream_t checked_stream(const char* op, Group& group, int32_t device);

}  // namespace slab
}  // namespace spec_kernels
