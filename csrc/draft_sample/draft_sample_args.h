// Validation shared by the CPU and CUDA registrations: tensors in, plain pointers and strides out.
#pragma once

#include "draft_sample/draft_sample.h"
#include "tree_verify/tree_verify_args.h"

namespace spec_kernels {

// Element (b, p, i) of an output.
template <class T>
struct Cube {
  T* data = nullptr;
  int64_t stride[3] = {};

  Cube() = default;
  explicit Cube(const std::optional<Tensor>& t) {
    if (!t) return;
    data = static_cast<T*>(t->data_ptr());
    for (int d = 0; d < 3; ++d) stride[d] = t->stride(d);
  }
  SK_HOST_DEVICE T* at(int64_t b, int64_t p) const { return data + b * stride[0] + p * stride[1]; }
  SK_HOST_DEVICE T& operator()(int64_t b, int64_t p, int64_t i) const {
    return at(b, p)[i * stride[2]];
  }
};

struct DraftSampleArgs {
  int64_t batch, num_rows, vocab, num_drafts, num_ids, depth;
  Float dtype;
  bool with_probs;
  Rows logits;
  const int64_t* target_ids;  // null: the same
  int64_t target_stride;
  IntMatrix context_lens;
  FloatColumn temperature;
  IntColumn seeds;
  Cube<int64_t> tokens;
  Cube<float> confidence, probs;

  SK_HOST_DEVICE int64_t target_id(int64_t id) const {
    return target_ids ? target_ids[id * target_stride] : id;
  }
  SK_HOST_DEVICE bool draws(int64_t b) const {
    return with_probs && temperature.at_or(b, 0.0f) > 0.0f;
  }
  SK_HOST_DEVICE uint32_t coin(int64_t b, int64_t draw) const {
    const uint64_t position = static_cast<uint64_t>(context_lens(b)) + static_cast<uint64_t>(depth);
    return coin_word(static_cast<uint64_t>(seeds.at_or(b, 0)), position, kDraft,
                     static_cast<uint32_t>(draw));
  }
};

SK_HOST_DEVICE inline bool is_temperature(float t) { return t >= 0.0f && t <= FLT_MAX; }

inline DraftSampleArgs draft_sample_args(const char* op, const Tensor& logits,
                                         const std::optional<Tensor>& target_ids,
                                         const Tensor& context_lens, int64_t depth,
                                         const std::optional<Tensor>& temperature,
                                         const std::optional<Tensor>& seeds, const Tensor& tokens,
                                         const Tensor& confidence,
                                         const std::optional<Tensor>& probs) {
  check_float(op, "logits", logits);
  check_shape(op, "logits", logits, {-1, -1, -1});
  check_last_dim(op, "logits", logits);
  DraftSampleArgs a{};
  a.batch = logits.size(0);
  a.num_rows = logits.size(1);
  a.vocab = logits.size(2);
  SK_CHECK(a.vocab >= 1 && a.vocab <= kMaxVocab, op, "logits",
           "1 to " + std::to_string(kMaxVocab) + " tokens", a.vocab);
  const auto check_typed = [&](const char* name, const Tensor& t, ScalarType type,
                               std::initializer_list<int64_t> shape) {
    check_same_device(op, name, t, logits);
    check_dtype(op, name, t, type);
    check_shape(op, name, t, shape);
  };
  if (target_ids) check_typed("target_ids", *target_ids, ScalarType::Long, {a.vocab});
  check_same_device(op, "context_lens", context_lens, logits);
  check_int(op, "context_lens", context_lens);
  check_shape(op, "context_lens", context_lens, {a.batch});
  SK_CHECK(depth >= 1, op, "depth", "at least 1", depth);
  if (temperature) check_typed("temperature", *temperature, ScalarType::Float, {a.batch});
  if (seeds) check_typed("seeds", *seeds, ScalarType::Long, {a.batch});
  SK_CHECK(seeds || !temperature || !probs, op, "seeds",
           "one seed for each request when drafts are drawn", "None");
  check_typed("tokens", tokens, ScalarType::Long, {a.batch, a.num_rows, -1});
  a.num_drafts = tokens.size(2);
  const int64_t most = a.vocab < kMaxDrafts ? a.vocab : kMaxDrafts;
  SK_CHECK(a.num_drafts >= 1 && a.num_drafts <= most, op, "tokens",
           "1 to " + std::to_string(most) + " drafts a row", a.num_drafts);
  check_typed("confidence", confidence, ScalarType::Float, {a.batch, a.num_rows, a.num_drafts});
  if (probs) {
    check_typed("probs", *probs, ScalarType::Float, {a.batch, a.num_rows, -1});
    check_last_dim(op, "probs", *probs);
    a.num_ids = probs->size(2);
    SK_CHECK(target_ids || a.num_ids >= a.vocab, op, "probs",
             "at least " + std::to_string(a.vocab) + " columns", a.num_ids);
  }
  check_outputs_apart(op,
                      {{"tokens", &tokens}, {"confidence", &confidence}, {"probs", given(probs)}},
                      {{"logits", &logits},
                       {"target_ids", given(target_ids)},
                       {"context_lens", &context_lens},
                       {"temperature", given(temperature)},
                       {"seeds", given(seeds)}});

  a.depth = depth;
  a.with_probs = probs.has_value();
  a.dtype = float_kind(logits.scalar_type());
  a.logits = Rows(logits);
  if (target_ids) {
    a.target_ids = static_cast<const int64_t*>(target_ids->data_ptr());
    a.target_stride = target_ids->stride(0);
  }
  a.context_lens = IntMatrix(context_lens);
  a.temperature = FloatColumn(temperature);
  a.seeds = IntColumn(seeds);
  a.tokens = Cube<int64_t>(tokens);
  a.confidence = Cube<float>(confidence);
  a.probs = Cube<float>(probs);
  return a;
}

}  // namespace spec_kernels
