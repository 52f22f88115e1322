"""The names of the all-reduce algorithms and the numbers that the ops take for them.

0 to 4 give the same bits: fp32 sums in the canonical order, one rounding. The others round in
between as well and are never chosen for a caller who does not name them.
"""

from __future__ import annotations

from spec_kernels.ops.common import fail

AUTO = 0
ALGORITHMS = {
    "auto": AUTO,
    "one_shot": 1,
    "two_shot": 2,
    "hierarchical": 3,
    "hierarchical_pull": 4,
    # bf16 partial sums between islands.
    "hierarchical_bf16": 5,
    # One-byte elements with scales on the wire.
    "two_shot_fp8": 6,
    "two_shot_int8": 7,
}
LOSSY = frozenset((5, 6, 7))
NAMES = {number: name for name, number in ALGORITHMS.items()}


def algorithm_id(op: str, algorithm: int | str) -> int:
    """The number of ``algorithm``, given by name or number."""
    number = ALGORITHMS.get(algorithm, -1) if isinstance(algorithm, str) else algorithm
    if number not in NAMES:
        fail(op, "algorithm", f"one of {', '.join(ALGORITHMS)}", repr(algorithm))
    return number
