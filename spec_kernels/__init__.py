"""Kernels and a reference loop that make speculative decoding pay on PCIe GPUs."""

from importlib.metadata import PackageNotFoundError, version

from spec_kernels.ops import *  # noqa: F403
from spec_kernels.ops import __all__ as _ops

try:
    __version__ = version("spec-kernels")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0.0.0+source"

__all__ = ["__version__", *_ops]
