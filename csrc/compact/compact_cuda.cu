// One launch for every layer's cache and every row tensor: blocks are (chunk of a tensor's row,
// request). A block moves its bytes of the request's rows.
//
// Kimi-K2.5, 61 caches of 1152-byte rows, 3 rows moved: 2 x 211 KB a request. That is 0.2 us of an
// RTX PRO 6000's 1.8 TB/s; what takes the time is the launch and four dependent reads (count, path,
// table, row), 3 to 4 us on paper.
#include "compact/compact_cuda.cuh"

namespace spec_kernels {
namespace {

constexpr char kOp[] = "compact";
constexpr int kThreads = 256;
constexpr int64_t kChunkBytes = 4096;  // 16 bytes a thread
constexpr int kMaxTensors = 88;        // of one launch; more take a second one

struct Params {
  MovePlaces places;
  MovedTensors<kMaxTensors> moved;
};
static_assert(sizeof(Params) <= 4096, "kernel parameters of every architecture and driver");

struct BlockSync {
  __device__ void operator()() const { __syncthreads(); }
};

__global__ void __launch_bounds__(kThreads) compact_kernel(const __grid_constant__ Params p) {
  const MovedTensor t = tensor_of(p.moved, static_cast<int32_t>(blockIdx.x));
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) - t.first_chunk) * kChunkBytes;
  const int64_t end = min(begin + kChunkBytes, t.row_bytes);
  SK_SHARED(int64_t, from, [kMoveTile]);
  SK_SHARED(int64_t, to, [kMoveTile]);
  const Movers<BlockSync> movers = {static_cast<int>(threadIdx.x), kThreads, from, to, {}};
  for (int64_t b = blockIdx.y; b < p.places.indices.batch; b += gridDim.y) {
    if (p.places.indices.length(b) < 0 && !mutant("compact_padding")) continue;
    const int64_t count = p.places.indices.count(b);
    if (!path_is_sound(p.places, b, count)) continue;
    move_rows<1>(p.places, t, b, count, begin, end, movers);
  }
}

void compact(Tensor accept_index, Tensor num_accepted, Tensor context_lens, Tensor block_tables,
             std::vector<Tensor> caches, std::vector<Tensor> rows) {
  check_cuda_tensor(kOp, "accept_index", accept_index);
  const CompactArgs args =
      compact_args(kOp, accept_index, num_accepted, context_lens, block_tables, caches, rows);
  if (args.indices.batch == 0) return;
  const DeviceGuard guard(accept_index.get_device_index());
  const cudaStream_t stream = current_stream(accept_index.get_device_index());
  const FaultCheck check(kOp, stream);
  const MovePlan plan(args, check.record());
  launch_moves(plan, 0, stream);
  check.finish([&](const Fault& f) { plan.raise(f); });
}

}  // namespace

MovePlan::MovePlan(const CompactArgs& args, Fault* record) : op(args.op), places{} {
  places.indices = args.indices;
  places.record = record;
  places.num_nodes = std::numeric_limits<int64_t>::max();
  for (int64_t i = 0; i < static_cast<int64_t>(args.moved.size()); ++i) {
    const MovedRows& t = args.moved[static_cast<size_t>(i)];
    int32_t k = -1;
    if (i < args.num_caches) {
      k = 0;
      while (k < places.num_page_sizes && places.page_sizes[k].size != t.inner) ++k;
      if (k == places.num_page_sizes) {
        SK_CHECK(k < kMaxPageSizes, op, "caches",
                 "at most " + std::to_string(kMaxPageSizes) + " different page sizes on CUDA",
                 k + 1);
        ++places.num_page_sizes;
        places.page_sizes[k] = {t.inner, t.outer};
        page_size_cache[k] = fewest_pages_cache[k] = i;
      } else if (t.outer < places.page_sizes[k].num_pages) {
        places.page_sizes[k].num_pages = t.outer;
        fewest_pages_cache[k] = i;
      }
    } else if (t.inner < places.num_nodes) {
      places.num_nodes = t.inner;
      fewest_nodes_rows = i - args.num_caches;
    }
    // A tensor without bytes may have no address; its sizes bound the path nevertheless.
    if (t.row_bytes > 0)
      tensors.push_back({t.data, t.outer_stride, t.inner_stride, t.row_bytes, k, 0});
  }
}

void MovePlan::raise(const Fault& f) const {
  switch (f.code) {
    case kCount:
      fail_count(op, f.index, places.indices.num_columns, f.got);
    case kOrder:
      fail_order(op, f.index, f.got);
    case kNode:
      fail_node(op, f.index, fewest_nodes_rows, places.num_nodes, f.got);
    case kPosition:
      fail_position(op, page_size_cache[f.index], places.indices.num_table_columns,
                    places.page_sizes[f.index].size, f.got);
    default:
      fail_page(op, fewest_pages_cache[f.index], places.page_sizes[f.index].num_pages, f.got);
  }
}

void launch_moves(const MovePlan& plan, size_t next, cudaStream_t stream) {
  Params p{};
  p.places = plan.places;
  const unsigned num_requests =
      static_cast<unsigned>(std::min<int64_t>(plan.places.indices.batch, 65535));
  while (next < plan.tensors.size()) {
    next = take_tensors(plan, next, kChunkBytes, p.moved);
    launch_kernel(plan.op, compact_kernel,
                  dim3(static_cast<unsigned>(p.moved.num_chunks), num_requests), kThreads, 0,
                  stream, p);
  }
}

SK_CUDA_LIBRARY_IMPL(m) { m.impl("compact", TORCH_BOX(&compact)); }

}  // namespace spec_kernels
