"""What the links between the GPUs of one machine do: whether peers reach each other, and how fast.

A driver may report peer access and yet drop, tear or delay writes, so nothing here is taken from
what it says: data is sent and compared. Times are measured on the devices' own clocks.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field

Matrix = list[list[float | None]]
_MATRICES = ("pair_write_gb_s", "pair_read_gb_s", "flag_us", "read_128b_us")


@dataclass(frozen=True)
class GpuId:
    """A GPU by names that no setting renumbers."""

    uuid: str
    pci: str  # domain:bus:device.function, lower case


@dataclass(frozen=True)
class FlowMeasurement:
    """Copies that ran at the same time, and what they moved together.

    ``flows``: (source, destination) pairs of data, as indices of ``LinkMeasurements.gpus``. With
    ``write`` the source stores into the destination's memory, with ``read`` the destination loads
    from the source's: GB/s (1e9 bytes) summed over the flows, None where not measured.
    """

    flows: tuple[tuple[int, int], ...]
    write: float | None = None
    read: float | None = None


@dataclass
class LinkMeasurements:
    """Measured properties of every link; None is a number that was not measured.

    Attributes:
        gpus: in rank order; what the indices below mean.
        pair_write_gb_s: ``[i][j]``, i alone stores a stream into j's memory.
        pair_read_gb_s: ``[i][j]``, i alone loads a stream from j's memory.
        flag_us: ``[i][j]``, from a store by i until j, polling its own memory, sees it.
        read_128b_us: ``[i][j]``, i loads 128 bytes from j's memory and has them.
        flows: concurrent copies: fan-out of one source, and several pairs at once.
    """

    gpus: list[GpuId]
    pair_write_gb_s: Matrix = field(default_factory=list)
    pair_read_gb_s: Matrix = field(default_factory=list)
    flag_us: Matrix = field(default_factory=list)
    read_128b_us: Matrix = field(default_factory=list)
    flows: list[FlowMeasurement] = field(default_factory=list)

    def __post_init__(self):
        """Matrices left out are filled with None. ValueError for one that fits no machine."""
        num = len(self.gpus)
        for name in _MATRICES:
            matrix = getattr(self, name) or [[None] * num for _ in range(num)]
            if len(matrix) != num or any(len(row) != num for row in matrix):
                sizes = f"{len(matrix)} rows of {sorted({len(row) for row in matrix})}"
                raise ValueError(f"LinkMeasurements: {name}: expected [{num}][{num}], got {sizes}")
            for row in matrix:
                for value in row:
                    _check_number(name, value)
            setattr(self, name, matrix)
        for f in self.flows:
            pairs = list(f.flows)
            sound = all(0 <= s < num and 0 <= d < num and s != d for s, d in pairs)
            if not pairs or not sound:
                raise ValueError(
                    f"LinkMeasurements: flows: expected pairs of different GPUs below {num}, "
                    f"got {pairs}"
                )
            _check_number("flows", f.write)
            _check_number("flows", f.read)

    def to_json(self) -> str:
        """A dict of the fields above; ``flows`` as ``{flows: [[s, d], ...], write, read}``."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> LinkMeasurements:
        """The inverse of ``to_json``. ValueError for anything else."""
        try:
            data = json.loads(text)
            gpus = [GpuId(str(g["uuid"]), str(g["pci"])) for g in data.pop("gpus")]
            flows = [
                FlowMeasurement(
                    tuple((int(s), int(d)) for s, d in f["flows"]), f.get("write"), f.get("read")
                )
                for f in data.pop("flows", [])
            ]
            return LinkMeasurements(gpus, flows=flows, **data)
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"LinkMeasurements: expected what to_json wrote, got {type(error).__name__}: "
                f"{error}"
            ) from None


def _check_number(name: str, value) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and math.isfinite(value) and value >= 0):
        raise ValueError(f"LinkMeasurements: {name}: expected numbers >= 0 or None, got {value!r}")
