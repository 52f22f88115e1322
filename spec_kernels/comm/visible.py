"""Which GPUs ``CUDA_VISIBLE_DEVICES`` names, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from spec_kernels.comm.sysfs import normal_address


class Named(Protocol):
    """What tells one GPU from another."""

    @property
    def uuid(self) -> str: ...

    @property
    def pci(self) -> str: ...


def visible_devices(text: str | None, gpus: Sequence[Named]) -> tuple[int, ...]:
    """Positions in ``gpus`` (all of the driver's, in its order) that ``text`` names, in its order.

    As CUDA reads it: numbers, or UUIDs (``GPU-...``, or as much of one as is unique); None is all,
    "" none; what follows the first number that is not a GPU's is not seen. PCI addresses, which
    CUDA does not document, are understood too.

    Raises:
        ValueError: a MIG device, an unknown or ambiguous name, or a GPU that is named twice.
    """
    if text is None:
        return tuple(range(len(gpus)))
    chosen: list[int] = []
    for part in (part.strip() for part in text.split(",")) if text.strip() else ():
        if part.lstrip("+-").isdecimal() and part.isascii():
            if not 0 <= int(part) < len(gpus):
                break
            found = [int(part)]
        elif part.upper().startswith("MIG-"):
            raise _error(part, "MIG devices cannot reach each other: use whole GPUs")
        elif part.upper().startswith("GPU-"):
            found = [k for k, g in enumerate(gpus) if g.uuid.lower().startswith(part.lower())]
        elif pci := normal_address(part) or normal_address(f"0000:{part}"):
            found = [k for k, g in enumerate(gpus) if g.pci == pci]
        else:
            raise _error(part, "expected a number, a UUID (GPU-...) or a PCI address")
        if len(found) != 1:
            several = f"{len(found)} of the {len(gpus)} GPUs have this name"
            raise _error(part, several if found else f"none of the {len(gpus)} GPUs has this name")
        if found[0] in chosen:
            raise _error(part, "this GPU is named twice")
        chosen += found
    return tuple(chosen)


def _error(part: str, what: str) -> ValueError:
    return ValueError(f"visible devices: {part!r}: {what}")
