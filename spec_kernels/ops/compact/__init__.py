from spec_kernels.ops.compact.api import compact

__all__ = ["compact"]
