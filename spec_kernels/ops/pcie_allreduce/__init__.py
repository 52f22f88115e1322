from spec_kernels.ops.pcie_allreduce.api import (
    pcie_all_gather,
    pcie_allreduce,
    pcie_allreduce_norm,
    pcie_barrier,
    pcie_broadcast,
)

__all__ = [
    "pcie_all_gather",
    "pcie_allreduce",
    "pcie_allreduce_norm",
    "pcie_barrier",
    "pcie_broadcast",
]
