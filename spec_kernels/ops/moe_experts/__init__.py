from spec_kernels.ops.moe_experts.api import INT4_GROUP, INT4_PER_WORD, moe_experts
from spec_kernels.ops.moe_experts.reference import dequantize_int4, router_topk

__all__ = [
    "INT4_GROUP",
    "INT4_PER_WORD",
    "dequantize_int4",
    "moe_experts",
    "router_topk",
]
