// One call of the tree attention kernel on one thread, for benchmarks/count_instructions.py: a tree
// of 4 children a node behind a prefix, absorbed MLA (8 heads, 512 + 64 columns) or 8 query heads
// on 2 KV heads of 128. Arguments: form (mla, gqa), query type (fp32, bf16, fp16), cache type
// (same, fp8), context, nodes.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tree_attention/tree_attention.h"

using namespace spec_kernels;

int main(int argc, char** argv) {
  if (argc != 6) return 1;
  const bool mla = std::strcmp(argv[1], "mla") == 0;
  const std::string type = argv[2];
  const int64_t context = std::atoll(argv[4]), num_nodes = std::atoll(argv[5]);

  TreeAttentionArgs a{};
  a.dtype = type == "fp32" ? Float::kF32 : type == "bf16" ? Float::kBf16 : Float::kF16;
  a.cache_dtype = std::strcmp(argv[3], "fp8") == 0 ? Float::kF8 : a.dtype;
  a.num_heads = 8;
  const int64_t num_kv_heads = mla ? 1 : 2;
  a.group = a.num_heads / num_kv_heads;
  a.k_dim = mla ? 576 : 128;
  a.v_dim = mla ? 512 : 128;
  a.page = 16;
  a.scale = 0.05f;
  const int64_t num_blocks = (context + num_nodes + a.page - 1) / a.page;

  // The values do not matter, the bytes do: 0x3c is a number in every type.
  const auto bytes = [](int64_t elements, Float f) {
    return std::vector<char>(static_cast<size_t>(elements * float_size(f)), 0x3c);
  };
  const std::vector<char> q = bytes(num_nodes * a.num_heads * a.k_dim, a.dtype);
  const int64_t row = num_kv_heads * a.k_dim;
  const std::vector<char> k = bytes(num_blocks * a.page * row, a.cache_dtype);
  const std::vector<char> v = mla ? k : bytes(num_blocks * a.page * row, a.cache_dtype);
  std::vector<char> out = bytes(num_nodes * a.num_heads * a.v_dim, a.dtype);
  std::vector<float> lse(static_cast<size_t>(num_nodes * a.num_heads));
  std::vector<int32_t> table(static_cast<size_t>(num_blocks));
  for (int64_t i = 0; i < num_blocks; ++i) table[i] = static_cast<int32_t>(i);
  const float one[2] = {1.0f, 1.0f};

  a.q[0] = q.data();
  a.q_dim[0] = a.k_dim;
  a.q_stride[0][1] = a.num_heads * a.k_dim;
  a.q_stride[0][2] = a.k_dim;
  a.k = k.data();
  a.v = mla ? k.data() : v.data();
  for (int64_t(*stride)[3] : {&a.k_stride, &a.v_stride}) {
    (*stride)[0] = a.page * row;
    (*stride)[1] = row;
    (*stride)[2] = a.k_dim;
  }
  a.out = out.data();
  a.out_stride[1] = a.num_heads * a.v_dim;
  a.out_stride[2] = a.v_dim;
  a.lse = lse.data();
  a.lse_stride[1] = a.num_heads;
  a.lse_stride[2] = 1;
  a.tables = table.data();
  a.table_stride[1] = 1;
  if (a.cache_dtype == Float::kF8) {
    a.k_scale = a.v_scale = one;
    a.k_scale_stride = a.v_scale_stride = 1;
  }

  std::vector<AttentionNode> nodes;
  std::vector<int32_t> slots;
  int64_t last = 0;
  for (const bool chains : {true, false}) {
    for (int64_t n = 0; n < num_nodes; ++n) {
      std::vector<int32_t> path;
      for (int64_t i = n;; i = (i - 1) / 4) {
        path.insert(path.begin(), static_cast<int32_t>(i));
        if (i == 0) break;
      }
      AttentionNode node{};
      node.row = static_cast<int32_t>(n);
      node.is_chain = path.back() + 1 == static_cast<int32_t>(path.size());
      if (node.is_chain != chains) continue;
      node.path = static_cast<int64_t>(slots.size());
      slots.insert(slots.end(), path.begin(), path.end());
      node.last = context + static_cast<int64_t>(path.size()) - 1;
      last = std::max(last, node.last);
      nodes.push_back(node);
    }
  }
  AttentionJob job{};
  job.context = context;
  job.nodes = nodes.data();
  job.slots = slots.data();
  job.num_nodes = num_nodes;
  for (const AttentionNode& node : nodes) job.num_chain += node.is_chain;
  job.num_leaves = last / kLeafKeys + 1;
  std::vector<float> scratch(
      static_cast<size_t>(scratch_floats(a, num_nodes * a.group, job.num_leaves)) + 16);
  float* const aligned =
      reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
  for (; job.kv_head < num_kv_heads; ++job.kv_head)
    SK_ISA::tree_attention_run(a, job, Bf16Math::kFma, aligned, nullptr);
  std::printf("lse %g\n", lse[0]);
}
