from spec_kernels.ops.tree_verify.api import Verified, tree_verify
from spec_kernels.ops.tree_verify.reference import Purpose, VerifyStatus

__all__ = ["Purpose", "Verified", "VerifyStatus", "tree_verify"]
