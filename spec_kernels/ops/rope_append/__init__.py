from spec_kernels.ops.rope_append.api import rope_append, rope_append_mla

__all__ = ["rope_append", "rope_append_mla"]
