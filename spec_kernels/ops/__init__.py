"""The operations, one folder each: contract (``api``), oracle (``reference``), kernels."""

from spec_kernels import _library
from spec_kernels.ops.compact import compact
from spec_kernels.ops.draft_sample import draft_sample
from spec_kernels.ops.hidden_capture import hidden_capture
from spec_kernels.ops.merge_states import merge_states
from spec_kernels.ops.moe_experts import moe_experts
from spec_kernels.ops.pcie_allreduce import (
    pcie_all_gather,
    pcie_allreduce,
    pcie_allreduce_norm,
    pcie_barrier,
    pcie_broadcast,
)
from spec_kernels.ops.rope_append import rope_append, rope_append_mla
from spec_kernels.ops.tree_attention import (
    ContextShard,
    attention_split_size,
    attention_splits,
    tree_attention,
    tree_attention_mla,
)
from spec_kernels.ops.tree_build import (
    DraftTree,
    TreeStatus,
    chain_tree,
    link_tree,
    num_words,
    tree_build,
    tree_from_paths,
)
from spec_kernels.ops.tree_verify import (
    FlatVerified,
    Purpose,
    Verified,
    VerifyStatus,
    tree_verify,
    tree_verify_choices,
    tree_verify_coins,
    tree_verify_compact,
)

for _name in _library.SCHEMAS:
    _library.register_triton(_name)

__all__ = [
    "ContextShard",
    "DraftTree",
    "FlatVerified",
    "Purpose",
    "TreeStatus",
    "Verified",
    "VerifyStatus",
    "attention_split_size",
    "attention_splits",
    "chain_tree",
    "compact",
    "draft_sample",
    "hidden_capture",
    "link_tree",
    "merge_states",
    "moe_experts",
    "num_words",
    "pcie_all_gather",
    "pcie_allreduce",
    "pcie_allreduce_norm",
    "pcie_barrier",
    "pcie_broadcast",
    "rope_append",
    "rope_append_mla",
    "tree_attention",
    "tree_attention_mla",
    "tree_build",
    "tree_from_paths",
    "tree_verify",
    "tree_verify_choices",
    "tree_verify_coins",
    "tree_verify_compact",
]
