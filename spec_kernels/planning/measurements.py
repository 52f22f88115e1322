"""Figures that a cycle's cost is made of, and the files that they are read from.

A costs file is JSON. Everything but ``format`` and ``version`` may be left out; what a file does
not say comes from ``data/defaults.json``, of which nothing was measured by this project::

    {
      "format": "spec-kernels costs",
      "version": 1,
      "about": "where these figures are from",
      "rates": {"bandwidth_gb_s": 1480, "kernel_us": {"value": 2.1, "low": 1.8, "high": 2.6}},
      "allreduce_us": {"14336": 11.2, "57344": {"value": 15.8, "low": 15.1, "high": 17.0}},
      "draft_step_ms": 0.6,
      "cost_curve_ms": {"1": 9.6, "4": 13.1, "8": 17.9}
    }

A number stands for a measured value; an object has ``value`` and may have ``low``, ``high``,
``label`` and ``source`` (see ``parts.Quantity``). ``RATES`` lists the rates. Keys of
``allreduce_us`` are bytes a rank contributes, those of ``cost_curve_ms`` verified tokens a request,
whose time is that of the target's pass and the choice of tokens, without the drafter.

``load`` also reads what ``spec-kernels bench allreduce --json`` and ``spec-kernels tune --box
--json`` print, and what ``spec-kernels decode --json`` writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from spec_kernels.comm.bench import PREDICTED
from spec_kernels.comm.selection import DEFAULT_MAX_BYTES, candidates
from spec_kernels.comm.simulator import boxes, predict_us
from spec_kernels.comm.tuning import HIDDEN
from spec_kernels.ops.pcie_allreduce.algorithms import ALGORITHMS, LOSSY
from spec_kernels.planning.checks import fail, is_number, parse_json
from spec_kernels.planning.parts import CycleCost, CyclePart, Quantity

FORMAT = "spec-kernels costs"
VERSION = 1
RATES = {
    "bandwidth_gb_s": "GB/s at which a GPU reads weights in a step",
    "routing": "share of the experts beyond a first token's that uniform routing would touch",
    "attention_gb_s": "GB/s at which attention reads the cache for many requests",
    "attention_one_gb_s": "the same, for one reading of one request",
    "kernel_us": "us of a small kernel that waits for the one before, in a graph",
    "eager_us": "us of the host for one launch without a graph",
    "layer_kernels": "kernels of a layer",
    "drafter_kernels": "kernels of a forward of the drafter",
    "other_kernels": "kernels of a cycle outside layers and drafter",
    "host_ms": "ms of a cycle in which the device waits for the host",
    "nccl_us": "us of a small message by NCCL, which takes what allreduce_us does not list",
    "nccl_bus_gb_s": "NCCL's bus bandwidth, GB/s: 2 (n - 1) / n of the message over its time",
}
# The simulator against measured all-reduces of up to 16 KiB: 30 % either way; one-shots of longer
# messages took up to 2.3 times as long as it says (docs/allreduce.md).
_SIMULATED_LOW, _SIMULATED_HIGH = 0.85, 2.0
_BOX_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Measurements:
    """What is known of a machine and of how an engine runs on it.

    Attributes:
        about: where the figures are from.
        rates: every rate of ``RATES``, > 0 but for ``host_ms``.
        allreduce_us: us of an all-reduce by bytes, ascending; longer messages are NCCL's.
        draft_step_ms: of one forward of the drafter, if it was measured.
        cost_curve_ms: of the target's pass by verified tokens a request, if it was measured.
        cycles: of a measured run, phase by phase.
    """

    about: str
    rates: Mapping[str, Quantity]
    allreduce_us: Mapping[int, Quantity] = field(default_factory=dict)
    draft_step_ms: Quantity | None = None
    cost_curve_ms: Mapping[int, Quantity] = field(default_factory=dict)
    cycles: tuple[CycleCost, ...] = ()

    def __post_init__(self) -> None:
        if self.rates.keys() != RATES.keys():
            odd = sorted(self.rates.keys() ^ RATES.keys())
            raise fail("Measurements", "rates", "those of RATES, no more and no fewer", odd)
        for name, q in self.rates.items():
            if q.low <= 0 and name != "host_ms":
                raise fail("Measurements", name, "low > 0", q.low)
        for name in ("allreduce_us", "cost_curve_ms"):
            table = getattr(self, name)
            object.__setattr__(self, name, dict(sorted(table.items())))
            for key in table:
                if isinstance(key, bool) or not isinstance(key, int) or key < 1:
                    raise fail("Measurements", name, "keys >= 1", key)

    def with_rates(self, **rates: Quantity) -> Measurements:
        """The same with some rates replaced."""
        return replace(self, rates={**self.rates, **rates})

    def sum_us(self, num_bytes: int, num_ranks: int) -> Quantity:
        """One all-reduce. From the table, linear in bytes between two of its sizes; or NCCL's."""
        if num_ranks == 1:
            return Quantity.exactly(0.0, "modelled", "one rank sums nothing")
        table = self.allreduce_us
        if table and num_bytes <= max(table):
            return interpolated(table, num_bytes)
        latency, rate = self.rates["nccl_us"], self.rates["nccl_bus_gb_s"]
        wire = 2 * (num_ranks - 1) / num_ranks * num_bytes / 1e3
        return Quantity(
            latency.value + wire / rate.value,
            latency.low + wire / rate.high,
            latency.high + wire / rate.low,
            "modelled",
            f"NCCL: {latency.source}; {rate.value:g} GB/s on the bus",
        )

    def updated(self, other: Mapping[str, Any]) -> Measurements:
        """The same with what a parsed costs file says in place; ValueError as for ``load``."""
        return _from_costs(other, "costs", self)

    def as_dict(self) -> dict:
        """A costs file that reads back as this, ``cycles`` aside."""
        data = {
            "format": FORMAT,
            "version": VERSION,
            "about": self.about,
            "rates": {name: asdict(q) for name, q in self.rates.items()},
            "allreduce_us": {str(size): asdict(q) for size, q in self.allreduce_us.items()},
            "cost_curve_ms": {str(num): asdict(q) for num, q in self.cost_curve_ms.items()},
        }
        if self.draft_step_ms is not None:
            data["draft_step_ms"] = asdict(self.draft_step_ms)
        return data


def interpolated(table: Mapping[int, Quantity], at: int) -> Quantity:
    """Linear between neighbours of an ascending table, flat outside it."""
    keys = list(table)
    above = next((k for k in keys if k >= at), keys[-1])
    below = next((k for k in reversed(keys) if k <= at), keys[0])
    a, b = table[below], table[above]
    if above <= below:
        return a
    share = (at - below) / (above - below)
    ends = ((1 - share) * getattr(a, e) + share * getattr(b, e) for e in ("value", "low", "high"))
    # Rounding must not put the guess a last bit outside its bounds.
    value, low, high = ends
    label = a.label if a.label == b.label else "modelled"
    return Quantity(min(max(value, low), high), low, high, label, a.source)


# Files.


def _object(where: str, name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise fail(where, name, "an object", value)
    return value


def _quantity(where: str, name: str, value: Any, source: str) -> Quantity:
    if isinstance(value, Mapping):
        unknown = sorted(value.keys() - {"value", "low", "high", "label", "source"})
        if unknown:
            raise fail(where, name, "value, low, high, label, source", unknown)
        if "value" not in value:
            raise fail(where, name, "a value", dict(value))
        middle = value["value"]
        low, high = value.get("low", middle), value.get("high", middle)
        label, source = value.get("label", "measured"), value.get("source", source)
    else:
        low = middle = high = value
        label = "measured"
    try:
        return Quantity(middle, low, high, label, source)
    except ValueError as error:
        raise ValueError(f"{where}: {name}: {error}") from error


def _table(where: str, name: str, value: Any, source: str) -> dict[int, Quantity]:
    table = {}
    for key, entry in _object(where, name, value).items():
        if not str(key).isdecimal() or int(key) < 1:
            raise fail(where, name, "keys that are whole numbers >= 1", key)
        table[int(key)] = _quantity(where, f"{name}: {key}", entry, source)
    return table


def _from_costs(data: Mapping, where: str, base: Measurements | None) -> Measurements:
    if data.get("format", FORMAT) != FORMAT:
        raise fail(where, "format", repr(FORMAT), data.get("format"))
    if data.get("version", VERSION) != VERSION:
        raise fail(where, "version", str(VERSION), data.get("version"))
    known = {"format", "version", "about", "rates", "allreduce_us", "draft_step_ms"}
    unknown = sorted(data.keys() - known - {"cost_curve_ms"})
    if unknown:
        raise fail(where, unknown[0], "no such field", data[unknown[0]])
    about = data.get("about", where)
    if not isinstance(about, str) or not about.strip():
        raise fail(where, "about", "where the figures are from", about)
    rates = {}
    for name, value in _object(where, "rates", data.get("rates", {})).items():
        if name not in RATES:
            raise fail(where, f"rates: {name}", f"one of {', '.join(RATES)}", value)
        rates[name] = _quantity(where, f"rates: {name}", value, about)
        if rates[name].low <= 0 and name != "host_ms":
            raise fail(where, f"rates: {name}", "a number > 0", value)
    fields: dict[str, Any] = {"about": about, "rates": rates}
    for name in ("allreduce_us", "cost_curve_ms"):
        if name in data:
            fields[name] = _table(where, name, data[name], about)
    if "draft_step_ms" in data:
        fields["draft_step_ms"] = _quantity(where, "draft_step_ms", data["draft_step_ms"], about)
    if base is None:
        return Measurements(**fields)
    return replace(base, **fields | {"rates": {**base.rates, **rates}})


@cache
def defaults() -> Measurements:
    """What stands where nothing was measured; low ends of times follow from specified rates."""
    path = files("spec_kernels.planning").joinpath("data/defaults.json")
    return _from_costs(json.loads(path.read_text()), "defaults.json", None)


def on_box(
    name: str, base: Measurements | None = None, num_ranks: int = 8, hidden: int = HIDDEN
) -> Measurements:
    """``base`` (``defaults()``) with the all-reduces that the simulator predicts for a box.

    Each size takes the fastest exact algorithm that a group would choose unmeasured. ValueError for
    a box that ``comm/boxes.json`` does not describe.
    """
    base = base or defaults()
    return replace(base, allreduce_us=dict(_simulated(name, num_ranks, hidden)))


@cache
def _simulated(name: str, num_ranks: int, hidden: int) -> tuple[tuple[int, Quantity], ...]:
    known = boxes()
    if name not in known:
        raise fail("on_box", "name", f"one of {', '.join(known)}", name)
    box = known[name]
    if not 2 <= num_ranks <= box.num_ranks:
        raise fail("on_box", "num_ranks", f"2 to {box.num_ranks}", num_ranks)
    if num_ranks < box.num_ranks:
        box = box.select(range(num_ranks))
    island = box.island_size
    source = f"simulator, {name}; it missed published figures by -15 % to a factor of 2"
    found = []
    for size in (2 * hidden * num for num in _BOX_TOKENS):
        if size <= DEFAULT_MAX_BYTES:
            us = min(
                predict_us(box, algorithm, size, num_ranks, island_size=island)
                for algorithm in candidates(box, num_ranks, island)
            )
            ends = (us, _SIMULATED_LOW * us, _SIMULATED_HIGH * us)
            found.append((size, Quantity(*ends, "modelled", source)))
    return tuple(found)


def load(path: str | Path, base: Measurements | None = None) -> Measurements:
    """Reads a file of figures over ``base`` (``defaults()``).

    Args:
        path: a costs file, or the JSON of ``bench allreduce``, of ``tune --box`` (one box), or of
            ``decode``.
        base: what holds where the file says nothing.

    Raises:
        ValueError: naming the file, the field, what was expected and what was found.
        OSError: the file cannot be read.
    """
    base = base or defaults()
    where = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: expected JSON, got: {error}") from error
    data = parse_json(where, text)
    if isinstance(data, list):
        return _from_allreduces(data, where, base)
    data = _object(where, "file", data)
    if "phases_ms" in data:
        return _from_decode(data, where, base)
    if "entries" in data and "rates" not in data:
        raise ValueError(
            f"{where}: entries: expected times, got a table of algorithms without any; what "
            "spec-kernels bench allreduce --json prints has them"
        )
    if "format" not in data:
        raise fail(where, "format", f"{FORMAT!r}, or another file of this package", sorted(data))
    return _from_costs(data, where, base)


def _number(where: str, name: str, value: Any) -> float:
    if not is_number(value):
        raise fail(where, name, "a number", value)
    if value < 0:
        raise fail(where, name, "a number >= 0", value)
    return float(value)


def _from_allreduces(data: Sequence, where: str, base: Measurements) -> Measurements:
    """Of each size the fastest exact algorithm, from the rows of one machine."""
    if len(data) != 1 or not isinstance(data[0], Mapping) or "rows" not in data[0]:
        raise fail(where, "file", "the rows of one machine's all-reduces", data[:1])
    rows = data[0]["rows"]
    if not isinstance(rows, list) or not rows:
        raise fail(where, "rows", "a list of all-reduces", rows)
    lossy = {name for name, number in ALGORITHMS.items() if number in LOSSY}
    table: dict[int, Quantity] = {}
    for k, row in enumerate(rows):
        row = _object(where, f"rows: {k}", row)
        size, name = row.get("bytes"), row.get("algorithm")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise fail(where, f"rows: {k}: bytes", "an integer >= 1", size)
        keys = ("us_p50", "us_p10", "us_p90")
        us = [_number(where, f"rows: {k}: {key}", row.get(key)) for key in keys]
        if name in lossy or (size in table and table[size].value <= us[0]):
            continue
        predicted = row.get("check") == PREDICTED
        if predicted:
            us[1:] = (_SIMULATED_LOW * us[0], _SIMULATED_HIGH * us[0])
        label = "modelled" if predicted else "measured"
        source = f"{where}, {name}" + (", simulated" if predicted else ", 10th to 90th percentile")
        value = {"value": us[0], "low": us[1], "high": us[2], "label": label, "source": source}
        table[size] = _quantity(where, f"rows: {k}", value, where)
    return replace(base, about=where, allreduce_us=table)


def _from_decode(data: Mapping, where: str, base: Measurements) -> Measurements:
    """Phases of each pass; the drafter's step and two points of the curve from the first."""
    passes = data.get("passes", [data])
    if not isinstance(passes, list) or not passes:
        raise fail(where, "passes", "a list of passes", passes)
    draft = _object(where, "draft", data.get("draft"))
    steps, nodes = draft.get("steps"), draft.get("num_nodes")
    for name, value in (("steps", steps), ("num_nodes", nodes)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise fail(where, f"draft: {name}", "an integer >= 1", value)
    cycles, phases = [], []
    for k, one in enumerate(passes):
        one = _object(where, f"passes: {k}", one)
        name = f"passes: {k}: phases_ms"
        phase = {
            key: _number(where, f"{name}: {key}", ms)
            for key, ms in _object(where, name, one.get("phases_ms")).items()
        }
        missing = {"draft", "build", "verify", "accept", "extend"} - phase.keys()
        if missing:
            raise fail(where, name, f"the phases {', '.join(sorted(missing))} too", sorted(phase))
        phases.append(dict(phase))
        phase["between phases"] = max(
            0.0, whole_cycle_ms(one, f"{where}: passes: {k}") - math.fsum(phase.values())
        )
        source = f"{where}, mean of {one['num_cycles']} cycles"
        parts = [CyclePart(key, ms, ms, ms, "measured", source) for key, ms in phase.items()]
        cycles.append(CycleCost(tuple(parts), f"{one.get('name', 'cycle')}: {where}"))
    first = phases[0]
    plain = _number(where, "plain_step_ms", passes[0].get("plain_step_ms"))

    def mean(ms: float) -> Quantity:
        return Quantity.exactly(ms, "measured", f"{where}, a mean, without a spread")

    verify = first["build"] + first["verify"] + first["accept"]
    return replace(
        base,
        about=where,
        draft_step_ms=mean((first["draft"] + first["extend"]) / steps),
        cost_curve_ms={1: mean(plain), nodes: mean(verify)},
        cycles=tuple(cycles),
    )


def whole_cycle_ms(one: Mapping, where: str) -> float:
    """Of a pass of ``decode``: its seconds over its cycles.

    The first token of a prompt belongs to its prefill, as in ``speculative_tok_s``. ValueError
    beginning with ``where`` for figures that are none.
    """
    counts = {}
    for name in ("num_cycles", "num_tokens", "speculative_tok_s"):
        counts[name] = _number(where, name, one.get(name))
        if counts[name] == 0:
            raise fail(where, name, "a number > 0: nothing was decoded", 0)
    prompts = one.get("prompts")
    if not isinstance(prompts, list):
        raise fail(where, "prompts", "a list", prompts)
    decoded = counts["num_tokens"] - len(prompts)
    if decoded <= 0:
        raise fail(where, "num_tokens", "more than one a prompt", one["num_tokens"])
    return 1e3 * decoded / counts["speculative_tok_s"] / counts["num_cycles"]
