from spec_kernels.ops.tree_verify.api import Verified, tree_verify
from spec_kernels.ops.tree_verify.coins import (
    FlatVerified,
    tree_verify_choices,
    tree_verify_coins,
)
from spec_kernels.ops.tree_verify.compact import tree_verify_compact
from spec_kernels.ops.tree_verify.reference import Purpose, VerifyStatus, philox4x32

__all__ = [
    "FlatVerified",
    "Purpose",
    "Verified",
    "VerifyStatus",
    "philox4x32",
    "tree_verify",
    "tree_verify_choices",
    "tree_verify_coins",
    "tree_verify_compact",
]
