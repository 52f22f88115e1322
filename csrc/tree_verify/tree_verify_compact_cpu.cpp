#include <torch/csrc/stable/library.h>

#include <optional>
#include <vector>

#include "compact/compact_cpu.h"
#include "tree_verify/tree_verify_compact_args.h"
#include "tree_verify/tree_verify_cpu.h"

namespace spec_kernels {
namespace {

constexpr char kOp[] = "tree_verify_compact";

void tree_verify_compact(Tensor logits, Tensor tokens, Tensor first_child, Tensor next_sibling,
                         Tensor context_lens, std::optional<Tensor> temperature,
                         std::optional<Tensor> top_k, std::optional<Tensor> top_p,
                         std::optional<Tensor> min_p, std::optional<Tensor> seeds,
                         std::optional<Tensor> logit_bias, std::optional<Tensor> allowed,
                         std::optional<Tensor> draft_probs, double typical_epsilon,
                         double typical_delta, Tensor block_tables, Tensor accept_index,
                         Tensor num_accepted, Tensor out_tokens, Tensor status,
                         std::vector<Tensor> caches, std::vector<Tensor> rows) {
  check_cpu(kOp, "logits", logits);
  const TreeVerifyCompactArgs args = tree_verify_compact_args(
      kOp, logits, tokens, first_child, next_sibling, context_lens, temperature, top_k, top_p,
      min_p, seeds, logit_bias, allowed, draft_probs, typical_epsilon, typical_delta, block_tables,
      accept_index, num_accepted, out_tokens, status, caches, rows);
  tree_verify_on_cpu(kOp, args.verify);
  compact_on_cpu(args.compact);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spec_kernels, CPU, m) {
  m.impl("tree_verify_compact", TORCH_BOX(&tree_verify_compact));
}

}  // namespace spec_kernels
