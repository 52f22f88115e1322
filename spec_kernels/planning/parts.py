"""Numbers with bounds, a label and a source, and a cycle's time as a sum of such parts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from spec_kernels.planning.checks import fail, is_number

# measured: somebody timed it; modelled: follows from sizes and other numbers; fitted: chosen so
# that a published total comes out; assumed: nobody timed it, and the source says why it is likely.
LABELS = ("measured", "modelled", "fitted", "assumed")


def _check(where: str, value: float, low: float, high: float, label: str, source: str) -> None:
    for name, number in (("value", value), ("low", low), ("high", high)):
        # bool is an int to Python, and a slip in a file.
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise fail(where, name, "a number", number)
        if not is_number(number) or number < 0:
            raise fail(where, name, "a finite number >= 0", number)
    if not low <= value <= high:
        raise fail(where, "low, value, high", "ascending numbers", (low, value, high))
    if label not in LABELS:
        raise fail(where, "label", f"one of {', '.join(LABELS)}", label)
    if not isinstance(source, str) or not source.strip():
        raise fail(where, "source", "where the number is from", source)


@dataclass(frozen=True)
class Quantity:
    """A number >= 0 that is not known exactly.

    Attributes:
        value: the best guess.
        low, high: where it may lie; not a confidence interval unless the source says so.
        label: one of ``LABELS``.
        source: where it is from.

    Raises:
        ValueError: a number is negative or not finite, they do not ascend, no such label, no
            source.
    """

    value: float
    low: float
    high: float
    label: str
    source: str

    def __post_init__(self) -> None:
        _check("Quantity", self.value, self.low, self.high, self.label, self.source)

    @classmethod
    def exactly(cls, value: float, label: str, source: str) -> Quantity:
        return cls(value, value, value, label, source)

    def times(self, factor: float) -> Quantity:
        """The same thing ``factor`` times (>= 0)."""
        values = (factor * x for x in (self.value, self.low, self.high))
        return Quantity(*values, self.label, self.source)


@dataclass(frozen=True)
class CyclePart:
    """What one thing adds to a cycle, in milliseconds; fields and errors as of ``Quantity``.

    A part is time by which the cycle is longer: work that other work hides is no part.
    """

    name: str
    ms: float
    low: float
    high: float
    label: str
    source: str

    def __post_init__(self) -> None:
        _check(f"CyclePart {self.name!r}", self.ms, self.low, self.high, self.label, self.source)

    @classmethod
    def of(cls, name: str, q: Quantity, label: str | None = None) -> CyclePart:
        """A quantity in milliseconds as a part, ``label`` instead of its own if given."""
        return cls(name, q.value, q.low, q.high, label or q.label, q.source)


@dataclass(frozen=True)
class CycleCost:
    """A cycle, or a step of plain decoding, as the sum of its parts.

    Attributes:
        title: what cycle this is.
        parts: in the order in which they are shown.
    """

    parts: tuple[CyclePart, ...]
    title: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        names = [part.name for part in self.parts]
        if not names or len(set(names)) < len(names):
            raise fail("CycleCost", "parts", "at least one, no name twice", names)

    @property
    def total(self) -> float:
        """Milliseconds."""
        return math.fsum(part.ms for part in self.parts)

    def interval(self) -> tuple[float, float]:
        """(low, high) in ms if every part lies at its low, or its high, end at the same time."""
        return math.fsum(p.low for p in self.parts), math.fsum(p.high for p in self.parts)

    def spread(self) -> tuple[float, float]:
        """(low, high) in ms if parts err independently: each side's distances, root-sum-square."""
        below = math.sqrt(math.fsum((p.ms - p.low) ** 2 for p in self.parts))
        above = math.sqrt(math.fsum((p.high - p.ms) ** 2 for p in self.parts))
        return self.total - below, self.total + above

    def part(self, name: str) -> CyclePart:
        """The part of that name; ValueError if there is none."""
        for part in self.parts:
            if part.name == name:
                return part
        names = ", ".join(part.name for part in self.parts)
        raise fail("CycleCost", "part", f"one of {names}", name)

    def table(self) -> list[str]:
        """Lines of text: each part, the total with both intervals."""
        width = max(len(p.name) for p in self.parts)
        width = max(width, len("total"))
        lines = [self.title] if self.title else []
        lines.append(f"{'part':{width}} {'ms':>6}  {'low - high':>13}  {'label':8}  source")
        for p in self.parts:
            span = f"{p.low:.2f} - {p.high:.2f}"
            lines.append(f"{p.name:{width}} {p.ms:6.2f}  {span:>13}  {p.label:8}  {p.source}")
        low, high = self.interval()
        inner, outer = self.spread()
        lines.append(
            f"{'total':{width}} {self.total:6.2f}  {f'{low:.2f} - {high:.2f}':>13}  "
            f"(all parts at one end; {inner:.2f} - {outer:.2f} if they err independently)"
        )
        return lines

    def as_dict(self) -> dict:
        return {
            "title": self.title,
            "total_ms": self.total,
            "interval_ms": list(self.interval()),
            "spread_ms": list(self.spread()),
            "parts": [asdict(part) for part in self.parts],
        }


def combine(quantities: Iterable[Quantity], label: str, source: str) -> Quantity:
    """The sum, its ends the sums of the ends."""
    parts = list(quantities)
    sums = (math.fsum(getattr(q, end) for q in parts) for end in ("value", "low", "high"))
    return Quantity(*sums, label, source)


def product(a: Quantity, b: Quantity, label: str, source: str) -> Quantity:
    return Quantity(a.value * b.value, a.low * b.low, a.high * b.high, label, source)


def quotient(a: Quantity, b: Quantity, label: str, source: str) -> Quantity:
    """``a`` over ``b``, which must be > 0 at its low end."""
    if b.low <= 0:
        raise fail("quotient", "b", f"a low end > 0 ({b.source})", b.low)
    return Quantity(a.value / b.value, a.low / b.high, a.high / b.low, label, source)
