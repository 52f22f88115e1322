// Collectives between the devices of one machine, one launch each: the ranks' blocks pass packets
// through each other's slabs (protocol.cuh, exchange.cuh).
#include "common/device.cuh"
#include "hidden_capture/hidden_capture.cuh"
#include "hidden_capture/hidden_capture_args.h"
#include "pcie_allreduce/coded.cuh"
#include "pcie_allreduce/exchange.cuh"
#include "pcie_allreduce/group_cuda.h"
#include "pcie_allreduce/pcie_allreduce_args.h"

namespace spec_kernels {
namespace {

using pcie::Call;
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
    tile.store(p, p.out, p.out_aligned, sound ? sum : filled(slab::kSentinel));
  }
};

// What follows the sum of rows: added to the residual, captured, normalised, as hidden_capture
// does. A row's tiles may be several blocks'; each leaves the squares of its segment in a table,
// tagged with the epoch, so that nothing has to be cleared. Where the sum did not come it is NaN,
// and so is all that is made of it.
template <class T>
class Normalise {
 public:
  __device__ Normalise(const Params& p, const hidden::Params& h)
      : p_(p), h_(h), table_(reinterpret_cast<uint64_t*>(p.slabs[p.rank] + p.layout.norm_table)) {}

  __device__ void tile(Call& call, int k, const Tile<T>& tile, const Packet& sum, bool) {
    static_assert(pcie::kThreads == hidden::kSegmentPackets);
    SK_SHARED(float, warps, [2][hidden::kSegmentWarps]);
    Packet row = filled(0);
    if (tile.num > 0) {
      const hidden::Place place{tile.row, tile.column, tile.num};
      row = hidden::add<T>(h_, place, hidden::residual_of<T>(h_, place), sum);
      hidden::capture<T>(h_, place, row);
    }
    const float squares = hidden::warp_squares(hidden::packet_squares<T>(row));
    if (threadIdx.x % 32 == 0) warps[turn_][threadIdx.x / 32] = squares;
    __syncthreads();
    if (threadIdx.x == 0) {
      const float segment = hidden::segment_squares(warps[turn_]);
      pcie::store_device(table_ + k, uint64_t{call.epoch()} << 32 | __float_as_uint(segment));
    }
    turn_ ^= 1;  // the other one is read before the next barrier
  }

  // Once all tiles of the block have been in `tile`.
  __device__ void finish(Call& call) {
    pcie::for_tiles(p_, [&](int k) {
      const Tile<T> tile(p_, k);
      if (tile.num == 0) return;
      const hidden::Place place{tile.row, tile.column, tile.num};
      const float scale = hidden::inverse_root(h_, row_squares(call, tile.row * p_.row_tiles));
      hidden::write_out<T>(h_, place, hidden::residual_of<T>(h_, place), scale);
    });
  }

 private:
  // Of the row whose first tile is `first`; NaN if they did not come.
  __device__ float row_squares(Call& call, int first) {
    constexpr int kBatch = 8;
    float total = 0.0f;
#pragma unroll 1
    for (int begin = 0; begin < p_.row_tiles; begin += kBatch) {
      float squares[kBatch];
      uint32_t missing = pcie::first_bits(min(kBatch, p_.row_tiles - begin));
      while (missing && !call.over()) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (!(missing >> i & 1u)) continue;
          const uint64_t entry = pcie::load_device(table_ + first + begin + i);
          squares[i] = __uint_as_float(static_cast<uint32_t>(entry));
          const bool old = entry >> 32 != call.epoch();
          if (!old || (mutant("allreduce_norm_stale") && ~entry != 0)) missing &= ~(1u << i);
        }
        if (missing) call.look(slab::Phase::kNormalise, p_.rank, first + begin);
      }
      if (missing) return __uint_as_float(0x7fffffffu);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (begin + i < p_.row_tiles) total += squares[i];
      }
    }
    return total;
  }

  const Params& p_;
  const hidden::Params& h_;
  uint64_t* table_;
  int turn_ = 0;
};

template <class T, int kAlgorithm, class Epilogue>
__device__ void sum_over_ranks(const Params& p, Call& call, Epilogue& epilogue) {
  if constexpr (kAlgorithm == slab::kOneShot) {
    pcie::one_shot<T>(p, call, epilogue);
  } else if constexpr (kAlgorithm == slab::kTwoShot) {
    pcie::two_shot<T>(p, call, epilogue);
  } else if constexpr (kAlgorithm == slab::kHierarchical) {
    pcie::hierarchical<T, pcie::Across::kPush>(p, call, epilogue);
  } else if constexpr (kAlgorithm == slab::kHierarchicalPull) {
    pcie::hierarchical<T, pcie::Across::kPull>(p, call, epilogue);
  } else if constexpr (kAlgorithm == slab::kHierarchicalBf16) {
    pcie::hierarchical<T, pcie::Across::kPushBf16>(p, call, epilogue);
  } else {
    pcie::two_shot_coded<T>(p, call, epilogue);
  }
}

template <class T, int kAlgorithm>
__global__ void __launch_bounds__(pcie::kThreads, 1)
    allreduce_kernel(const __grid_constant__ Params p) {
  Call call(p);
  StoreSum<T> epilogue{p};
  sum_over_ranks<T, kAlgorithm>(p, call, epilogue);
  call.finish();
}

template <class T, int kAlgorithm>
__global__ void __launch_bounds__(pcie::kThreads, 1)
    allreduce_norm_kernel(const __grid_constant__ Params p,
                          const __grid_constant__ hidden::Params h) {
  Call call(p);
  Normalise<T> epilogue(p, h);
  sum_over_ranks<T, kAlgorithm>(p, call, epilogue);
  epilogue.finish(call);
  call.finish();
}

// f(algorithm as a constant)
template <class F>
auto with_algorithm(int32_t algorithm, F&& f) {
  switch (algorithm) {
    case slab::kOneShot:
      return f(std::integral_constant<int, slab::kOneShot>());
    case slab::kTwoShot:
      return f(std::integral_constant<int, slab::kTwoShot>());
    case slab::kHierarchical:
      return f(std::integral_constant<int, slab::kHierarchical>());
    case slab::kHierarchicalPull:
      return f(std::integral_constant<int, slab::kHierarchicalPull>());
    case slab::kHierarchicalBf16:
      return f(std::integral_constant<int, slab::kHierarchicalBf16>());
    default:  // and kTwoShotInt8, which asks
      return f(std::integral_constant<int, slab::kTwoShotFp8>());
  }
}

template <class T>
auto allreduce_kernel_of(int32_t algorithm) {
  return with_algorithm(algorithm, [](auto a) { return &allreduce_kernel<T, decltype(a)::value>; });
}
template <class T>
auto allreduce_norm_kernel_of(int32_t algorithm) {
  return with_algorithm(algorithm,
                        [](auto a) { return &allreduce_norm_kernel<T, decltype(a)::value>; });
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

template <class... P, class... A>
void launch(const char* op, Group& group, void (*kernel)(P...), Params& p, int32_t num_blocks,
            cudaStream_t stream, const A&... more) {
#if defined(SK_MUTANTS)
  p.host_epoch = group.num_launches++;
#endif
  const int32_t grid = std::min(num_blocks, p.num_tiles);
  launch_kernel(op, kernel, dim3(static_cast<unsigned>(grid)), pcie::kThreads, 0, stream, p,
                more...);
}

// The algorithm and the number of blocks for a sum of `bytes`.
slab::Entry chosen(const char* op, const Group& group, int64_t algorithm, int64_t bytes) {
  slab::Entry entry = group.entry(static_cast<uint64_t>(bytes));
  if (algorithm != slab::kAuto) entry.algorithm = static_cast<int32_t>(algorithm);
  const bool islands =
      entry.algorithm >= slab::kHierarchical && entry.algorithm <= slab::kHierarchicalBf16;
  SK_CHECK(!islands || group.attach.island_size > 0, op, "algorithm",
           "one without islands: this group has none", algorithm);
  // The islands are part of what is rounded.
  const int32_t size = slab::bf16_island_size(group.attach.world_size);
  SK_CHECK(entry.algorithm != slab::kHierarchicalBf16 || group.attach.island_size == size, op,
           "algorithm",
           "one other than hierarchical_bf16, which has islands of " + std::to_string(size),
           algorithm);
  return entry;
}

// Tiles that one launch carries.
int32_t capacity_of(const Group& group, int32_t algorithm) {
  return algorithm == slab::kOneShot ? group.layout.one_shot_tiles : group.layout.two_shot_tiles;
}

void pcie_allreduce(Tensor input, Tensor out, Tensor workspace, int64_t rank, int64_t world_size,
                    int64_t timeout_ms, int64_t algorithm) {
  const char* op = "pcie_allreduce";
  check_group(op, rank, world_size, timeout_ms);
  check_cuda_tensor(op, "input", input);
  check_same_device(op, "out", out, input);
  check_allreduce(op, input, out);
  check_algorithm(op, input, algorithm);
  if (world_size == 1) return copy(op, input, out);
  Group& group = checked_group(op, workspace, input, rank, world_size);
  check_apart(op, "input", input, workspace);
  check_apart(op, "out", out, workspace);
  const slab::Entry entry = chosen(op, group, algorithm, num_bytes(input));
  if (input.numel() == 0) return;
  const DeviceGuard guard(input.get_device_index());
  const cudaStream_t stream = slab::checked_stream(op, group, input.get_device_index());

  Params p = group_params(group, entry.algorithm, timeout_ms);
  p.input_aligned = aligned(input.data_ptr());
  p.out_aligned = aligned(out.data_ptr());
  const auto run = [&](auto kernel, int64_t item) {
    const int64_t tile_elements = static_cast<int64_t>(slab::kTileBytes) / item;
    const int64_t most = capacity_of(group, entry.algorithm) * tile_elements;
    for (int64_t begin = 0; begin < input.numel(); begin += most) {
      p.input = static_cast<const char*>(input.data_ptr()) + begin * item;
      p.out = static_cast<char*>(out.data_ptr()) + begin * item;
      p.row_elements = std::min(most, input.numel() - begin);
      p.num_tiles = p.row_tiles =
          static_cast<int32_t>((p.row_elements + tile_elements - 1) / tile_elements);
      launch(op, group, kernel, p, entry.num_blocks, stream);
    }
  };
  switch (input.scalar_type()) {
    case ScalarType::Float:
      return run(allreduce_kernel_of<float>(entry.algorithm), 4);
    case ScalarType::BFloat16:
      return run(allreduce_kernel_of<__nv_bfloat16>(entry.algorithm), 2);
    default:
      return run(allreduce_kernel_of<__half>(entry.algorithm), 2);
  }
}

void pcie_allreduce_norm(Tensor input, Tensor residual, Tensor weight, double eps, Tensor out,
                         std::optional<Tensor> capture, int64_t slot, Tensor workspace,
                         int64_t rank, int64_t world_size, int64_t timeout_ms, int64_t algorithm) {
  const char* op = "pcie_allreduce_norm";
  check_group(op, rank, world_size, timeout_ms);
  check_cuda_tensor(op, "residual", residual);
  const HiddenCaptureArgs args =
      hidden_capture_args(op, input, residual, weight, eps, out, capture, slot, "input");
  check_contiguous(op, "input", input);
  check_algorithm(op, input, algorithm);
  const int64_t num_rows = input.size(0);
  const int32_t device = input.get_device_index();
  if (world_size == 1) return hidden_capture_cuda(op, args, num_rows, device);
  Group& group = checked_group(op, workspace, input, rank, world_size);
  check_outputs_apart(op, {{"workspace", &workspace}},
                      {{"input", &input},
                       {"residual", &residual},
                       {"weight", &weight},
                       {"out", &out},
                       {"capture", given(capture)}});
  const slab::Entry entry = chosen(op, group, algorithm, num_bytes(input));
  if (input.numel() == 0) return;

  const int64_t item = static_cast<int64_t>(input.element_size());
  Params p = group_params(group, entry.algorithm, timeout_ms);
  p.row_elements = args.hidden;
  const int64_t row_bytes = args.hidden * item;
  const int64_t row_tiles = (row_bytes + slab::kTileBytes - 1) / slab::kTileBytes;
  const int64_t most_tiles =
      std::min<int64_t>(capacity_of(group, entry.algorithm), slab::kNormEntries);
  SK_CHECK(row_tiles <= most_tiles, op, "input",
           "rows of at most " + std::to_string(most_tiles * slab::kTileBytes) +
               " bytes, which one launch of this algorithm carries",
           row_bytes);
  p.row_tiles = static_cast<int32_t>(row_tiles);
  const int64_t most_rows = most_tiles / row_tiles;
  const DeviceGuard guard(device);
  const cudaStream_t stream = slab::checked_stream(op, group, device);
  const auto run = [&](auto kernel) {
    for (int64_t begin = 0; begin < num_rows; begin += most_rows) {
      const int64_t rows = std::min(most_rows, num_rows - begin);
      p.input = static_cast<const char*>(input.data_ptr()) + begin * row_bytes;
      p.input_aligned = aligned(p.input) && row_bytes % slab::kPacketBytes == 0;
      p.num_tiles = static_cast<int32_t>(rows * row_tiles);
      launch(op, group, kernel, p, entry.num_blocks, stream,
             hidden::params(rows_from(args, begin)));
    }
  };
  if (args.dtype == Float::kBf16) {
    run(allreduce_norm_kernel_of<__nv_bfloat16>(entry.algorithm));
  } else {
    run(allreduce_norm_kernel_of<float>(entry.algorithm));
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
  m.impl("pcie_allreduce_norm", TORCH_BOX(&pcie_allreduce_norm));
  m.impl("pcie_all_gather", TORCH_BOX(&pcie_all_gather));
  m.impl("pcie_broadcast", TORCH_BOX(&pcie_broadcast));
  m.impl("pcie_barrier", TORCH_BOX(&pcie_barrier));
}

}  // namespace spec_kernels
