"""The operations, one folder each: contract (``api``), oracle (``reference``), kernels."""

from spec_kernels.ops.hidden_capture import hidden_capture

__all__ = ["hidden_capture"]
