from spec_kernels.ops.tree_attention.api import tree_attention, tree_attention_mla
from spec_kernels.ops.tree_attention.shards import ContextShard
from spec_kernels.ops.tree_attention.splits import (
    KEY_BLOCK,
    MAX_SPLITS,
    attention_split_size,
    attention_splits,
)

__all__ = [
    "KEY_BLOCK",
    "MAX_SPLITS",
    "ContextShard",
    "attention_split_size",
    "attention_splits",
    "tree_attention",
    "tree_attention_mla",
]
