// Collectives between the devices of one machine, one launch each: the ranks' blocks pass packets
// through each other's slabs (protocol.cuh, exchange.cuh).
#include "common/device.cuh"
#include "pcie_allreduce/exchange.cuh"
#include "pcie_allreduce/group_cuda.h"
#include "pcie_allreduce/pcie_allreduce_args.h"

namespace spec_kernels {
namespace {

using pcie::Call;
using pcie::Packet;
using pcie::Params;
using pcie::Tile;
using slab::Algorithm;
using slab::Group;

// The sum goes to `out`; poison (NaN in all dtypes) where it did not come.
template <class T>
struct StoreSum {
  const Params& p;

  __device__ void tile(Call& call, int k, const Tile<T>& tile, const Packet& sum, bool sound) {
    if (tile.num == 0 || (!sound && mutant("allreduce_no_poison"))) return;
    tile.store(p.out, p.out_aligned, sound ? sum : pcie::filled(slab::kSentinel));
  }
};

template <class T, int kAlgorithm>
__global__ void __launch_bounds__(pcie::kThreads, 1)
    allreduce_kernel(const __grid_constant__ Params p) {
  Call call(p);
  StoreSum<T> epilogue{p};
  if constexpr (kAlgorithm == slab::kOneShot) {
    pcie::one_shot<T>(p, call, epilogue);
  } else if constexpr (kAlgorithm == slab::kTwoShot) {
    pcie::two_shot<T>(p, call, epilogue);
  } else {
    pcie::hierarchical<T, kAlgorithm == slab::kHierarchicalPull>(p, call, epilogue);
  }
  call.finish();
}

using Kernel = void (*)(Params);

template <class T>
Kernel allreduce_kernel_of(int32_t algorithm) {
  switch (algorithm) {
    case slab::kOneShot:
      return &allreduce_kernel<T, slab::kOneShot>;
    case slab::kTwoShot:
      return &allreduce_kernel<T, slab::kTwoShot>;
    case slab::kHierarchical:
      return &allreduce_kernel<T, slab::kHierarchical>;
    default:
      return &allreduce_kernel<T, slab::kHierarchicalPull>;
  }
}

__global__ void __launch_bounds__(pcie::kThreads) pass_on_kernel(const __grid_constant__ Params p) {
  Call call(p);
  pcie::pass_on(p, call);
  call.finish();
}

// 16 bytes at a time where all addresses allow it.
__global__ void __launch_bounds__(256)
    copy_kernel(const char* from, char* to, int64_t num, bool aligned) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t num_packets = aligned ? num / slab::kPacketBytes : 0;
  for (int64_t i = first; i < num_packets; i += stride)
    reinterpret_cast<Packet*>(to)[i] = reinterpret_cast<const Packet*>(from)[i];
  for (int64_t i = num_packets * slab::kPacketBytes + first; i < num; i += stride) to[i] = from[i];
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % slab::kPacketBytes == 0; }

// What a group of one does.
void copy(const char* op, const Tensor& from, const Tensor& to) {
  const int64_t num = num_bytes(from);
  if (num == 0 || from.data_ptr() == to.data_ptr()) return;
  const DeviceGuard guard(from.get_device_index());
  const int64_t num_blocks = std::min<int64_t>((num + 4095) / 4096, 1024);
  launch_kernel(op, &copy_kernel, dim3(static_cast<unsigned>(num_blocks)), 256, 0,
                current_stream(from.get_device_index()), static_cast<const char*>(from.data_ptr()),
                static_cast<char*>(to.data_ptr()), num,
                aligned(from.data_ptr()) && aligned(to.data_ptr()));
}

// The group behind `workspace`, which is the whole of this rank's slab.
Group& checked_group(const char* op, const Tensor& workspace, const Tensor& data, int64_t rank,
                     int64_t world_size) {
  check_cuda_tensor(op, "workspace", workspace);
  check_dtype(op, "workspace", workspace, ScalarType::Byte);
  check_contiguous(op, "workspace", workspace);
  check_same_device(op, "workspace", workspace, data);
  Group& group = slab::group_of(op, workspace.data_ptr(), rank, world_size);
  SK_CHECK(static_cast<uint64_t>(workspace.numel()) == group.layout.total, op, "workspace",
           std::to_string(group.layout.total) + " bytes", workspace.numel());
  return group;
}

Params group_params(Group& group, int32_t algorithm, int64_t timeout_ms) {
  Params p{};
  p.layout = group.layout;
  for (int r = 0; r < group.attach.world_size; ++r)
    p.slabs[r] = static_cast<char*>(group.attach.slabs[r]);
  p.status = group.attach.status_device;
  p.rank = group.attach.rank;
  p.world_size = group.attach.world_size;
  p.island_size = group.attach.island_size;
  p.algorithm = algorithm;
  p.timeout_ns = static_cast<uint64_t>(timeout_ms) * 1000000;
  return p;
}

void launch(const char* op, Group& group, Kernel kernel, Params& p, int32_t num_blocks,
            cudaStream_t stream) {
#if defined(SK_MUTANTS)
  p.host_epoch = group.num_launches++;
#endif
  const int32_t grid = std::min(num_blocks, p.num_tiles);
  launch_kernel(op, kernel, dim3(static_cast<unsigned>(grid)), pcie::kThreads, 0, stream, p);
}

void pcie_allreduce(Tensor input, Tensor out, Tensor workspace, int64_t rank, int64_t world_size,
                    int64_t timeout_ms, int64_t algorithm) {
  const char* op = "pcie_allreduce";
  check_group(op, rank, world_size, timeout_ms);
  check_cuda_tensor(op, "input", input);
  check_same_device(op, "out", out, input);
  check_allreduce(op, input, out);
  SK_CHECK(algorithm >= 0 && algorithm <= slab::kHierarchicalPull, op, "algorithm", "0 to 4",
           algorithm);
  if (world_size == 1) return copy(op, input, out);
  Group& group = checked_group(op, workspace, input, rank, world_size);
  check_apart(op, "input", input, workspace);
  check_apart(op, "out", out, workspace);
  SK_CHECK(algorithm < slab::kHierarchical || group.attach.island_size > 0, op, "algorithm",
           "0 to 2: this group has no islands", algorithm);
  const int64_t bytes = num_bytes(input);
  if (bytes == 0) return;
  const slab::Entry& entry = group.entry(static_cast<uint64_t>(bytes));
  const int32_t chosen =
      algorithm == slab::kAuto ? entry.algorithm : static_cast<int32_t>(algorithm);
  const DeviceGuard guard(input.get_device_index());
  const cudaStream_t stream = slab::checked_stream(op, group, input.get_device_index());

  Params p = group_params(group, chosen, timeout_ms);
  const ScalarType dtype = input.scalar_type();
  const Kernel kernel = dtype == ScalarType::Float      ? allreduce_kernel_of<float>(chosen)
                        : dtype == ScalarType::BFloat16 ? allreduce_kernel_of<__nv_bfloat16>(chosen)
                                                        : allreduce_kernel_of<__half>(chosen);
  const int64_t item = static_cast<int64_t>(input.element_size());
  const int64_t tile_elements = static_cast<int64_t>(slab::kTileBytes) / item;
  const int64_t capacity =
      chosen == slab::kOneShot ? group.layout.one_shot_tiles : group.layout.two_shot_tiles;
  p.input_aligned = aligned(input.data_ptr());
  p.out_aligned = aligned(out.data_ptr());
  for (int64_t begin = 0; begin < input.numel(); begin += capacity * tile_elements) {
    p.input = static_cast<const char*>(input.data_ptr()) + begin * item;
    p.out = static_cast<char*>(out.data_ptr()) + begin * item;
    p.row_elements = std::min(capacity * tile_elements, input.numel() - begin);
    p.num_tiles = p.row_tiles =
        static_cast<int32_t>((p.row_elements + tile_elements - 1) / tile_elements);
    launch(op, group, kernel, p, entry.num_blocks, stream);
  }
}

// Passes `bytes` bytes on, a slot at a time; `out` is written, part after part.
void pass_on(const char* op, Group& group, const void* input, void* out, int64_t bytes,
             int32_t source, int64_t timeout_ms, int32_t device) {
  const DeviceGuard guard(device);
  const cudaStream_t stream = slab::checked_stream(op, group, device);
  Params p = group_params(group, slab::kAuto, timeout_ms);
  const int64_t capacity = group.layout.one_shot_tiles * static_cast<int64_t>(slab::kTileBytes);
  p.source = source;
  p.part_bytes = source < 0 ? bytes : 0;
  p.input_aligned = aligned(input);
  p.out_aligned = aligned(out) && p.part_bytes % slab::kPacketBytes == 0;
  const int32_t num_blocks = group.entry(static_cast<uint64_t>(bytes)).num_blocks;
  int64_t begin = 0;
  do {  // a barrier is one launch without bytes
    p.input = static_cast<const char*>(input) + begin;
    p.out = static_cast<char*>(out) + begin;
    p.row_elements = std::min(capacity, bytes - begin);
    p.num_tiles = p.row_tiles = std::max<int32_t>(
        1, static_cast<int32_t>((p.row_elements + slab::kTileBytes - 1) / slab::kTileBytes));
    launch(op, group, &pass_on_kernel, p, num_blocks, stream);
    begin += capacity;
  } while (begin < bytes);
}

void pcie_all_gather(Tensor input, Tensor out, Tensor workspace, int64_t rank, int64_t world_size,
                     int64_t timeout_ms) {
  const char* op = "pcie_all_gather";
  check_group(op, rank, world_size, timeout_ms);
  check_cuda_tensor(op, "input", input);
  check_same_device(op, "out", out, input);
  check_all_gather(op, input, out, world_size);
  if (world_size == 1) return copy(op, input, out);
  Group& group = checked_group(op, workspace, input, rank, world_size);
  check_apart(op, "input", input, workspace);
  check_apart(op, "out", out, workspace);
  if (num_bytes(input) == 0) return;
  pass_on(op, group, input.data_ptr(), out.data_ptr(), num_bytes(input), -1, timeout_ms,
          input.get_device_index());
}

void pcie_broadcast(Tensor tensor, int64_t src, Tensor workspace, int64_t rank, int64_t world_size,
                    int64_t timeout_ms) {
  const char* op = "pcie_broadcast";
  check_group(op, rank, world_size, timeout_ms);
  check_cuda_tensor(op, "tensor", tensor);
  check_broadcast(op, tensor, src, world_size);
  if (world_size == 1) return;
  Group& group = checked_group(op, workspace, tensor, rank, world_size);
  check_apart(op, "tensor", tensor, workspace);
  if (num_bytes(tensor) == 0) return;
  pass_on(op, group, tensor.data_ptr(), tensor.data_ptr(), num_bytes(tensor),
          static_cast<int32_t>(src), timeout_ms, tensor.get_device_index());
}

void pcie_barrier(Tensor workspace, int64_t rank, int64_t world_size, int64_t timeout_ms) {
  const char* op = "pcie_barrier";
  check_group(op, rank, world_size, timeout_ms);
  if (world_size == 1) return;
  Group& group = checked_group(op, workspace, workspace, rank, world_size);
  pass_on(op, group, nullptr, nullptr, 0, -1, timeout_ms, workspace.get_device_index());
}

}  // namespace

SK_CUDA_LIBRARY_IMPL(m) {
  m.impl("pcie_allreduce", TORCH_BOX(&pcie_allreduce));
  m.impl("pcie_all_gather", TORCH_BOX(&pcie_all_gather));
  m.impl("pcie_broadcast", TORCH_BOX(&pcie_broadcast));
  m.impl("pcie_barrier", TORCH_BOX(&pcie_barrier));
}

}  // namespace spec_kernels
