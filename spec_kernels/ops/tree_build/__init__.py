from spec_kernels.ops.tree_build.api import (
    MAX_NODES,
    DraftTree,
    chain_tree,
    link_tree,
    num_words,
    tree_build,
    tree_from_paths,
)
from spec_kernels.ops.tree_build.reference import TreeStatus

__all__ = [
    "MAX_NODES",
    "DraftTree",
    "TreeStatus",
    "chain_tree",
    "link_tree",
    "num_words",
    "tree_build",
    "tree_from_paths",
]
