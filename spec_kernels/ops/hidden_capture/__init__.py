from spec_kernels.ops.hidden_capture.api import hidden_capture

__all__ = ["hidden_capture"]
