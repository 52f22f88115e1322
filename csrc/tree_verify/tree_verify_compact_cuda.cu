// tree_verify and compact in one launch: the block that has walked a request's tree moves what it
// accepted, in every layer. Both halves are those of the two ops (tree_verify_walk.cuh,
// compact_cuda.cuh).
//
// A warp takes a chunk of a tensor's row at a time and moves it for the whole path: each lane two
// columns of 16 bytes of up to four rows before it stores any, so 16 warps hold up to 64 KiB.
// Kimi-K2.5, 61 caches of 1152-byte rows and three features of 7168, 3 rows moved: 164 chunks, ten
// or eleven a warp, each a read that comes from L2 as a rule, for the step has just written it. On
// paper 4 to 6 us a request after its walk, where `compact` takes 3 to 4 us on all multiprocessors
// together and one launch more: what is saved is the launch and the reading of the path.
#include "compact/compact_cuda.cuh"
#include "tree_verify/tree_verify_compact_args.h"
#include "tree_verify/tree_verify_walk.cuh"

namespace spec_kernels {
namespace {

constexpr char kOp[] = "tree_verify_compact";
constexpr int64_t kChunkBytes = 1024;
constexpr int kMaxTensors = 80;  // of the first launch; the rest is moved by those of compact
static_assert(kCount > static_cast<int32_t>(BadParameter::kMinP), "one record for both halves");

struct Params {
  TreeVerifyArgs verify;
  MovePlaces places;
  MovedTensors<kMaxTensors> moved;
};
static_assert(sizeof(Params) <= 4096, "kernel parameters of every architecture and driver");

struct WarpSync {
  __device__ void operator()() const { __syncwarp(); }
};

template <Float kKind>
__global__ void __launch_bounds__(kMaxThreads, 1)
    tree_verify_compact_kernel(const __grid_constant__ Params p) {
  SK_DYNAMIC_SHARED(BlockState, state);
  static_assert(sizeof(state->list) >= sizeof(int64_t) * 2 * kMoveTile * kMaxWarps,
                "the list's memory holds the tables of every warp");
  const int64_t b = blockIdx.x;
  const int64_t count = walk_request<kKind>(p.verify, b, *state, p.places.record);
  if (count < 0) return;
  // Thread 0 wrote the path, which every thread reads; and the list has had its day.
  if (!mutant("tree_verify_compact_barrier")) __syncthreads();
  if (!path_is_sound(p.places, b, count)) return;
  int64_t* const tables = reinterpret_cast<int64_t*>(state->list) + warp_id() * 2 * kMoveTile;
  const Movers<WarpSync> movers = {lane_id(), kWarp, tables, tables + kMoveTile, {}};
  for (int32_t chunk = warp_id(); chunk < p.moved.num_chunks; chunk += num_warps()) {
    const MovedTensor& t = tensor_of(p.moved, chunk);
    const int64_t begin = (static_cast<int64_t>(chunk) - t.first_chunk) * kChunkBytes;
    move_rows<2>(p.places, t, b, count, begin, min(begin + kChunkBytes, t.row_bytes), movers);
  }
}

void tree_verify_compact(Tensor logits, Tensor tokens, Tensor first_child, Tensor next_sibling,
                         Tensor context_lens, std::optional<Tensor> temperature,
                         std::optional<Tensor> top_k, std::optional<Tensor> top_p,
                         std::optional<Tensor> min_p, std::optional<Tensor> seeds,
                         std::optional<Tensor> logit_bias, std::optional<Tensor> allowed,
                         std::optional<Tensor> draft_probs, double typical_epsilon,
                         double typical_delta, Tensor block_tables, Tensor accept_index,
                         Tensor num_accepted, Tensor out_tokens, Tensor status,
                         std::vector<Tensor> caches, std::vector<Tensor> rows) {
  check_cuda_tensor(kOp, "logits", logits);
  const TreeVerifyCompactArgs args = tree_verify_compact_args(
      kOp, logits, tokens, first_child, next_sibling, context_lens, temperature, top_k, top_p,
      min_p, seeds, logit_bias, allowed, draft_probs, typical_epsilon, typical_delta, block_tables,
      accept_index, num_accepted, out_tokens, status, caches, rows);
  if (args.verify.batch == 0) return;
  const int32_t device = logits.get_device_index();
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const FaultCheck check(kOp, stream);
  const MovePlan plan(args.compact, check.record());
  Params p{};
  p.verify = args.verify;
  p.places = plan.places;
  const size_t next = take_tensors(plan, 0, kChunkBytes, p.moved);
  const auto kernel = args.verify.dtype == Float::kBf16 ? &tree_verify_compact_kernel<Float::kBf16>
                                                        : &tree_verify_compact_kernel<Float::kF32>;
  launch_kernel(kOp, kernel, one_block_each(kOp, "logits", args.verify.batch),
                row_block(args.verify.vocab, args.verify.dtype), sizeof(BlockState), stream, p);
  launch_moves(plan, next, stream);
  check.finish([&](const Fault& f) {
    if (f.code < kCount) refuse(kOp, f);
    plan.raise(f);
  });
}

}  // namespace

SK_CUDA_LIBRARY_IMPL(m) { m.impl("tree_verify_compact", TORCH_BOX(&tree_verify_compact)); }

}  // namespace spec_kernels
