from spec_kernels.ops.moe_experts.api import moe_experts
from spec_kernels.ops.moe_experts.reference import dequantize_int4, router_topk

__all__ = ["dequantize_int4", "moe_experts", "router_topk"]
