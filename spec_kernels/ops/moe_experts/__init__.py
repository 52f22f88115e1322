from spec_kernels.ops.moe_experts.api import moe_experts
from spec_kernels.ops.moe_experts.reference import router_topk

__all__ = ["moe_experts", "router_topk"]
