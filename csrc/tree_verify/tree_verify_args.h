// Validation shared by the CPU and CUDA registrations: tensors in, plain pointers and strides out.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>

#include "common/check.h"
#include "tree_verify/tree_verify.h"

namespace spec_kernels {

// One value a request.
struct IntColumn {
  IntView data;
  int64_t stride = 0;

  IntColumn() = default;
  explicit IntColumn(const std::optional<Tensor>& t) {
    if (!t) return;
    data = IntView(*t);
    stride = t->stride(0);
  }
  SK_HOST_DEVICE int64_t at_or(int64_t b, int64_t otherwise) const {
    return data.data ? data[b * stride] : otherwise;
  }
};

struct FloatColumn {
  const float* data = nullptr;
  int64_t stride = 0;

  FloatColumn() = default;
  explicit FloatColumn(const std::optional<Tensor>& t) {
    if (!t) return;
    data = static_cast<const float*>(t->data_ptr());
    stride = t->stride(0);
  }
  SK_HOST_DEVICE float at_or(int64_t b, float otherwise) const {
    return data ? data[b * stride] : otherwise;
  }
};

// Rows (request, node) of adjacent elements.
struct Rows {
  const void* data = nullptr;  // null: not given
  int64_t request = 0, node = 0, item = 0;

  Rows() = default;
  explicit Rows(const std::optional<Tensor>& t) {
    if (!t) return;
    data = t->data_ptr();
    item = static_cast<int64_t>(t->element_size());
    request = t->stride(0) * item;
    node = t->dim() > 2 ? t->stride(1) * item : 0;
  }
  SK_HOST_DEVICE const void* at(int64_t b, int64_t i) const {
    return data ? static_cast<const char*>(data) + b * request + i * node : nullptr;
  }
};

struct Parameters {
  float temperature, top_p, min_p;
  int64_t top_k;
  uint64_t seed;
};

enum class BadParameter : int32_t { kNone = 0, kTemperature = 1, kTopP = 2, kMinP = 3 };

SK_HOST_DEVICE inline BadParameter out_of_range(const Parameters& p) {
  if (!(p.temperature >= 0.0f && p.temperature <= FLT_MAX)) return BadParameter::kTemperature;
  if (!(p.top_p >= 0.0f)) return BadParameter::kTopP;
  return p.min_p <= 1.0f ? BadParameter::kNone : BadParameter::kMinP;
}

[[noreturn]] inline void refuse(const char* op, BadParameter which, double got) {
  if (which == BadParameter::kTemperature) fail(op, "temperature", "finite values >= 0", got);
  if (which == BadParameter::kTopP) fail(op, "top_p", "values >= 0", got);
  fail(op, "min_p", "values <= 1", got);
}

SK_HOST_DEVICE inline float value_of(const Parameters& p, BadParameter which) {
  return which == BadParameter::kTemperature ? p.temperature
         : which == BadParameter::kTopP      ? p.top_p
                                             : p.min_p;
}

struct TreeVerifyArgs {
  int64_t batch, num_nodes, vocab, num_columns;
  Float dtype, draft_dtype;
  bool typical;
  double epsilon, delta;
  Rows logits, bias, allowed, draft_probs;
  IntMatrix tokens, first_child, next_sibling, context_lens;
  IntColumn top_k, seeds;
  FloatColumn temperature, top_p, min_p;
  MutableIntMatrix accept_index, num_accepted, out_tokens, status;

  SK_HOST_DEVICE Parameters parameters(int64_t b) const {
    return {temperature.at_or(b, 0.0f), top_p.at_or(b, 1.0f), min_p.at_or(b, 0.0f),
            top_k.at_or(b, 0), static_cast<uint64_t>(seeds.at_or(b, 0))};
  }

  SK_HOST_DEVICE WalkRules rules(int64_t b, const Parameters& p) const {
    return {num_nodes,
            vocab,
            num_columns,
            static_cast<uint64_t>(context_lens(b)),
            p.seed,
            p.temperature == 0.0f,
            draft_probs.data != nullptr,
            typical,
            epsilon,
            delta};
  }
};

inline TreeVerifyArgs tree_verify_args(
    const char* op, const Tensor& logits, const Tensor& tokens, const Tensor& first_child,
    const Tensor& next_sibling, const Tensor& context_lens,
    const std::optional<Tensor>& temperature, const std::optional<Tensor>& top_k,
    const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p,
    const std::optional<Tensor>& seeds, const std::optional<Tensor>& logit_bias,
    const std::optional<Tensor>& allowed, const std::optional<Tensor>& draft_probs,
    double typical_epsilon, double typical_delta, const Tensor& accept_index,
    const Tensor& num_accepted, const Tensor& out_tokens, const Tensor& status) {
  check_float(op, "logits", logits);
  check_shape(op, "logits", logits, {-1, -1, -1});
  check_last_dim(op, "logits", logits);
  TreeVerifyArgs a{};
  a.batch = logits.size(0);
  a.num_nodes = logits.size(1);
  a.vocab = logits.size(2);
  SK_CHECK(a.num_nodes >= 1 && a.num_nodes <= kMaxNodes && a.vocab >= 1 && a.vocab <= kMaxVocab, op,
           "logits",
           "1 to " + std::to_string(kMaxNodes) + " nodes and 1 to " + std::to_string(kMaxVocab) +
               " tokens",
           shape_string(logits));
  const auto check_ints = [&](const char* name, const Tensor& t,
                              std::initializer_list<int64_t> shape) {
    check_same_device(op, name, t, logits);
    check_int(op, name, t);
    check_shape(op, name, t, shape);
  };
  const auto check_typed = [&](const char* name, const Tensor& t, ScalarType type,
                               std::initializer_list<int64_t> shape) {
    check_same_device(op, name, t, logits);
    check_dtype(op, name, t, type);
    check_shape(op, name, t, shape);
  };
  check_ints("tokens", tokens, {a.batch, a.num_nodes});
  check_ints("first_child", first_child, {a.batch, a.num_nodes});
  check_ints("next_sibling", next_sibling, {a.batch, a.num_nodes});
  check_ints("context_lens", context_lens, {a.batch});
  if (temperature) {
    check_typed("temperature", *temperature, ScalarType::Float, {a.batch});
    SK_CHECK(seeds.has_value(), op, "seeds", "one seed for each request when temperature is given",
             "None");
  }
  if (top_k) check_ints("top_k", *top_k, {a.batch});
  if (top_p) check_typed("top_p", *top_p, ScalarType::Float, {a.batch});
  if (min_p) check_typed("min_p", *min_p, ScalarType::Float, {a.batch});
  if (seeds) check_typed("seeds", *seeds, ScalarType::Long, {a.batch});
  if (logit_bias) {
    check_typed("logit_bias", *logit_bias, ScalarType::Float, {a.batch, a.vocab});
    check_last_dim(op, "logit_bias", *logit_bias);
  }
  if (allowed) {
    check_typed("allowed", *allowed, ScalarType::Int, {a.batch, a.num_nodes, (a.vocab + 31) / 32});
    check_last_dim(op, "allowed", *allowed);
  }
  if (draft_probs) {
    check_same_device(op, "draft_probs", *draft_probs, logits);
    check_float(op, "draft_probs", *draft_probs);
    check_shape(op, "draft_probs", *draft_probs, {a.batch, a.num_nodes, a.vocab});
    check_last_dim(op, "draft_probs", *draft_probs);
  }
  a.typical = typical_epsilon != 0.0 || typical_delta != 0.0;
  if (a.typical) {
    SK_CHECK(typical_epsilon > 0.0 && typical_epsilon <= 1.0, op, "typical_epsilon",
             "a number in (0, 1]", typical_epsilon);
    SK_CHECK(typical_delta > 0.0 && typical_delta <= DBL_MAX, op, "typical_delta",
             "a finite number > 0", typical_delta);
    SK_CHECK(!draft_probs, op, "draft_probs", "none beside typical acceptance", "a tensor");
  }
  check_ints("accept_index", accept_index, {a.batch, -1});
  a.num_columns = accept_index.size(1);
  SK_CHECK(a.num_columns >= 1, op, "accept_index", "at least one column",
           shape_string(accept_index));
  check_ints("num_accepted", num_accepted, {a.batch});
  check_ints("out_tokens", out_tokens, {a.batch, a.num_columns});
  check_ints("status", status, {a.batch});
  check_outputs_apart(op,
                      {{"accept_index", &accept_index},
                       {"num_accepted", &num_accepted},
                       {"out_tokens", &out_tokens},
                       {"status", &status}},
                      {{"logits", &logits},
                       {"tokens", &tokens},
                       {"first_child", &first_child},
                       {"next_sibling", &next_sibling},
                       {"context_lens", &context_lens},
                       {"temperature", given(temperature)},
                       {"top_k", given(top_k)},
                       {"top_p", given(top_p)},
                       {"min_p", given(min_p)},
                       {"seeds", given(seeds)},
                       {"logit_bias", given(logit_bias)},
                       {"allowed", given(allowed)},
                       {"draft_probs", given(draft_probs)}});

  a.dtype = float_kind(logits.scalar_type());
  a.draft_dtype = draft_probs ? float_kind(draft_probs->scalar_type()) : Float::kF32;
  a.epsilon = typical_epsilon;
  a.delta = typical_delta;
  a.logits = Rows(logits);
  a.bias = Rows(logit_bias);
  a.allowed = Rows(allowed);
  a.draft_probs = Rows(draft_probs);
  a.tokens = IntMatrix(tokens);
  a.first_child = IntMatrix(first_child);
  a.next_sibling = IntMatrix(next_sibling);
  a.context_lens = IntMatrix(context_lens);
  a.temperature = FloatColumn(temperature);
  a.top_k = IntColumn(top_k);
  a.top_p = FloatColumn(top_p);
  a.min_p = FloatColumn(min_p);
  a.seeds = IntColumn(seeds);
  a.accept_index = MutableIntMatrix(accept_index);
  a.num_accepted = MutableIntMatrix(num_accepted);
  a.out_tokens = MutableIntMatrix(out_tokens);
  a.status = MutableIntMatrix(status);
  return a;
}

}  // namespace spec_kernels
