"""The operations, one folder each: contract (``api``), oracle (``reference``), kernels."""

from spec_kernels.ops.hidden_capture import hidden_capture
from spec_kernels.ops.moe_experts import moe_experts

__all__ = ["hidden_capture", "moe_experts"]
