// Validation shared by the CPU and CUDA registrations of the walk that moves what it accepts.
#pragma once

#include <optional>
#include <vector>

#include "compact/compact_args.h"
#include "tree_verify/tree_verify_args.h"

namespace spec_kernels {

struct TreeVerifyCompactArgs {
  TreeVerifyArgs verify;
  CompactArgs compact;
};

inline TreeVerifyCompactArgs tree_verify_compact_args(
    const char* op, const Tensor& logits, const Tensor& tokens, const Tensor& first_child,
    const Tensor& next_sibling, const Tensor& context_lens,
    const std::optional<Tensor>& temperature, const std::optional<Tensor>& top_k,
    const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p,
    const std::optional<Tensor>& seeds, const std::optional<Tensor>& logit_bias,
    const std::optional<Tensor>& allowed, const std::optional<Tensor>& draft_probs,
    double typical_epsilon, double typical_delta, const Tensor& block_tables,
    const Tensor& accept_index, const Tensor& num_accepted, const Tensor& out_tokens,
    const Tensor& status, const std::vector<Tensor>& caches, const std::vector<Tensor>& rows) {
  TreeVerifyCompactArgs args{};
  args.verify = tree_verify_args(op, logits, tokens, first_child, next_sibling, context_lens,
                                 temperature, top_k, top_p, min_p, seeds, logit_bias, allowed,
                                 draft_probs, typical_epsilon, typical_delta, accept_index,
                                 num_accepted, out_tokens, status);
  args.compact =
      compact_args(op, accept_index, num_accepted, context_lens, block_tables, caches, rows,
                   {{"logits", &logits},
                    {"tokens", &tokens},
                    {"first_child", &first_child},
                    {"next_sibling", &next_sibling},
                    {"temperature", given(temperature)},
                    {"top_k", given(top_k)},
                    {"top_p", given(top_p)},
                    {"min_p", given(min_p)},
                    {"seeds", given(seeds)},
                    {"logit_bias", given(logit_bias)},
                    {"allowed", given(allowed)},
                    {"draft_probs", given(draft_probs)},
                    {"out_tokens", &out_tokens},
                    {"status", &status}});
  // The walk writes while the move reads the table.
  check_outputs_apart(op,
                      {{"accept_index", &accept_index},
                       {"num_accepted", &num_accepted},
                       {"out_tokens", &out_tokens},
                       {"status", &status}},
                      {{"block_tables", &block_tables}});
  return args;
}

}  // namespace spec_kernels
