from spec_kernels.ops.merge_states.api import merge_states

__all__ = ["merge_states"]
