// One block a request walks its tree (tree_verify_walk.cuh).
#include "tree_verify/tree_verify_walk.cuh"

namespace spec_kernels {
namespace {

constexpr char kOp[] = "tree_verify";

template <Float kKind>
__global__ void __launch_bounds__(kMaxThreads, 1)
    tree_verify_kernel(const __grid_constant__ TreeVerifyArgs a, Fault* record) {
  SK_DYNAMIC_SHARED(BlockState, state);
  walk_request<kKind>(a, blockIdx.x, *state, record);
}

void tree_verify(Tensor logits, Tensor tokens, Tensor first_child, Tensor next_sibling,
                 Tensor context_lens, std::optional<Tensor> temperature,
                 std::optional<Tensor> top_k, std::optional<Tensor> top_p,
                 std::optional<Tensor> min_p, std::optional<Tensor> seeds,
                 std::optional<Tensor> logit_bias, std::optional<Tensor> allowed,
                 std::optional<Tensor> draft_probs, double typical_epsilon, double typical_delta,
                 Tensor accept_index, Tensor num_accepted, Tensor out_tokens, Tensor status) {
  check_cuda_tensor(kOp, "logits", logits);
  const TreeVerifyArgs args = tree_verify_args(
      kOp, logits, tokens, first_child, next_sibling, context_lens, temperature, top_k, top_p,
      min_p, seeds, logit_bias, allowed, draft_probs, typical_epsilon, typical_delta, accept_index,
      num_accepted, out_tokens, status);
  if (args.batch == 0) return;
  const int32_t device = logits.get_device_index();
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const FaultCheck check(kOp, stream);
  const auto kernel = args.dtype == Float::kBf16 ? &tree_verify_kernel<Float::kBf16>
                                                 : &tree_verify_kernel<Float::kF32>;
  launch_kernel(kOp, kernel, one_block_each(kOp, "logits", args.batch),
                row_block(args.vocab, args.dtype), sizeof(BlockState), stream, args,
                check.record());
  check.finish([](const Fault& fault) { refuse(kOp, fault); });
}

}  // namespace

SK_CUDA_LIBRARY_IMPL(m) { m.impl("tree_verify", TORCH_BOX(&tree_verify)); }

}  // namespace spec_kernels
