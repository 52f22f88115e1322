from spec_kernels.ops.draft_sample.api import draft_sample

__all__ = ["draft_sample"]
