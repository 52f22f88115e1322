"""What a verify cycle and a step of plain decoding cost, part by part."""

from spec_kernels.planning.parts import CycleCost, CyclePart

__all__ = ["CycleCost", "CyclePart"]
