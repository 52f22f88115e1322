"""What is known of a drafter and its cycle, read from whichever source says so."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spec_kernels.planning import viability
from spec_kernels.planning.checks import MOST_COUNTED, count, is_number, parse_json, rates
from spec_kernels.planning.measurements import whole_cycle_ms
from spec_kernels.planning.traces import Trace, accepted_by_cycle, chain_paths
from spec_kernels.planning.viability import Estimate


@dataclass(frozen=True)
class Acceptance:
    """How often drafts are right, and times where the source has them.

    Attributes:
        source: file and line, or option, that said so.
        full_accuracy: by draft step; empty where the source knows the accept length alone.
        accept_length: of ``num_drafts`` drafts.
        num_drafts: drafts in a cycle of the source; None where it does not say.
        num_cycles: cycles (or positions) counted; None where the source gives rates alone.
        cycle_ms: a whole cycle of the batch, drafting included; None where not known.
        plain_tok_s: plain decoding of the same batch; None where not known.
        batch: requests of a cycle in ``cycle_ms`` and ``plain_tok_s``.
        notes: what a reader must know of this source.
    """

    source: str
    full_accuracy: tuple[float, ...]
    accept_length: Estimate
    num_drafts: int | None
    num_cycles: int | None = None
    cycle_ms: float | None = None
    plain_tok_s: float | None = None
    batch: int = 1
    notes: tuple[str, ...] = ()


def by_hand(
    full_accuracy: Sequence[float],
    source: str = "given",
    num_cycles: int | None = None,
    notes: tuple[str, ...] = (),
) -> Acceptance:
    """Full accuracies that somebody states, over ``num_cycles`` counted cycles, if known."""
    length = (
        Estimate.exact(viability.accept_length(full_accuracy))
        if num_cycles is None
        else viability.accept_length_estimate(full_accuracy, num_cycles)
    )
    full = tuple(map(float, full_accuracy))
    return Acceptance(source, full, length, len(full), num_cycles, notes=notes)


def _fail(path: Path | str, where: str, expected: str, got: object) -> ValueError:
    text = got if isinstance(got, str) else repr(got)
    return ValueError(f"{path}: {where}: expected {expected}, got {text[:120]}")


def _text(path: Path | str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _fail(path, "encoding", "UTF-8 text", str(error)) from error


# Training logs.

_FULL, _CONDITIONAL, _STEPWISE = "full", "conditional", "stepwise"
# Ours write lists; others a number for each step: full_acc_0, cond_acc_0 (conditional), acc_0.
_RATE = re.compile(
    r"(?P<series>.*?)"
    r"(?P<kind>full_acc(?:uracy)?|cond(?:itional)?_acc(?:uracy)?|acc(?:uracy|es)?)"
    r"(?:[_@]?(?P<step>\d+))?(?:_epoch)?"
)
_HELD_OUT = re.compile(r"greedy|temperature|val|eval|test", re.IGNORECASE)
_TRAINING = "training"
FLATTERS = (
    "a training log counts every position of a text once, while a cycle starts where the last one "
    "ended, and hard places end it: with the bundled drafter and 3 drafts, accept lengths are 2 to "
    "8 % below what such rates give"
)


def _series_of(record: Mapping[str, object]) -> dict[str, dict[str, list[float]]]:
    """{series: {kind: rates by step}} of one record of a log."""
    found: dict[str, dict[str, dict[int, object]]] = {}
    for key, value in record.items():
        match = _RATE.fullmatch(key)
        if match is None or (match["step"] is None) is not isinstance(value, list):
            continue
        kind = {"f": _FULL, "c": _CONDITIONAL}.get(match["kind"][0], _STEPWISE)
        name = match["series"].strip("/_. ") or _TRAINING
        steps = found.setdefault(name, {}).setdefault(kind, {})
        if isinstance(value, list):
            steps.update(enumerate(value))
        else:
            steps[int(match["step"])] = value
    series: dict[str, dict[str, list[float]]] = {}
    for name, kinds in found.items():
        for kind, steps in kinds.items():
            first = min(steps, default=0)
            # A gap, or a first step of 2, is no list of drafts: some other metric of that name.
            if steps and first <= 1 and sorted(steps) == list(range(first, first + len(steps))):
                series.setdefault(name, {})[kind] = [steps[i] for i in sorted(steps)]
    return series


def read_training_log(
    path: Path | str, series: str | None = None, num_positions: int | None = None
) -> Acceptance:
    """The last accuracies by draft step in a training log of JSON lines.

    Understood: ``full_accuracy`` and ``conditional_accuracy`` lists (``spec-kernels train``), and
    one number a step (``full_acc_0``, ``cond_acc_0``, ``acc_0``), each with any prefix, which names
    the series (``greedy_full_accuracy``, ``val/full_acc_0``). Lines that are not JSON objects are
    skipped.

    Args:
        series: which one; None = a held-out one (greedy, val, eval, test) if there is any, else
            the training batches'.
        num_positions: that the rates were counted over, if known. Chains of neighbours overlap, so
            they count as that many cycles as cover them: positions / accept length.

    Raises:
        ValueError: no such accuracies, or some that cannot be; names file, line and field.
    """
    lines: list[tuple[int, dict[str, dict[str, list[float]]]]] = []
    skipped = 0
    for number, line in enumerate(_text(path).splitlines(), 1):
        try:
            record = parse_json(f"line {number}", line) if line.strip() else {}
        except ValueError:
            record = None
        if isinstance(record, dict):
            lines.append((number, _series_of(record)))
        else:
            skipped += 1
    names = list(dict.fromkeys(name for _, found in lines for name in found))
    if not names:
        raise _fail(
            path,
            "accuracies",
            "JSON lines with full_accuracy, conditional_accuracy, full_acc_0, cond_acc_0 or acc_0",
            "none",
        )
    if series is not None and series not in names:
        raise _fail(path, "series", f"one of {', '.join(names)}", series)
    name = series or next((n for n in names if _HELD_OUT.search(n)), names[0])
    number, kinds = next((i, found[name]) for i, found in reversed(lines) if name in found)
    kind = next(k for k in (_FULL, _CONDITIONAL, _STEPWISE) if k in kinds)
    where = f"line {number}, {name}, {kind} accuracy"
    try:
        full = (
            kinds[kind] if kind == _FULL else viability.full_from_conditional(kinds[kind]).tolist()
        )
        notes = [FLATTERS]
        if kind == _STEPWISE:
            notes.insert(0, f"{path}: accuracies by step are taken as conditional ones")
        if not _HELD_OUT.search(name):
            notes.insert(0, f"{path}: accuracies of training batches, not of held-out text")
        if len(names) > 1:
            others = ", ".join(n for n in names if n != name)
            notes.append(f"{path} also has the series {others} (--series)")
        if skipped:
            notes.append(f"{path}: {skipped} lines are no JSON objects, skipped")
        num_cycles = None
        if num_positions is not None:
            count("read_training_log", "num_positions", num_positions)
            num_cycles = max(1, round(num_positions / viability.accept_length(full)))
            notes.append(
                f"{num_positions} positions of a log overlap: taken as {num_cycles} cycles"
            )
        return by_hand(full, f"{path}, {where}", num_cycles, tuple(notes))
    except ValueError as error:
        raise ValueError(f"{path}: {where}: {error}") from error


# The main job's report.


def _number(path: Path | str, values: Mapping, field: str, above: float | None = None) -> float:
    value = values.get(field)
    expected = "a finite number" if above is None else f"a finite number > {above:g}"
    if not is_number(value) or (above is not None and value <= above):
        raise _fail(path, field, expected, value)
    return float(value)


def read_decode_report(path: Path | str, series: str | None = None) -> Acceptance:
    """What ``spec-kernels decode --json`` measured: counted accept lengths and times.

    ``series``: name of the pass (``greedy``, ``temperature 0.8``); None = the first. The cycle is
    the whole one: all seconds of decoding over all cycles, what lies between the phases included.

    Raises:
        ValueError: no such report or pass; names file, field, expected, got.
    """
    report = parse_json(str(path), _text(path))
    passes = report.get("passes") if isinstance(report, dict) else None
    if not isinstance(passes, list) or not passes or not all(isinstance(p, dict) for p in passes):
        raise _fail(path, "passes", "a report of spec-kernels decode --json", type(passes).__name__)
    names = [str(p.get("name")) for p in passes]
    if series is not None and series not in names:
        raise _fail(path, "series", f"one of {', '.join(names)}", series)
    one = passes[names.index(series) if series is not None else 0]
    histogram = one.get("accept_histogram")
    if not isinstance(histogram, dict) or not histogram:
        raise _fail(path, "accept_histogram", "cycles by accept length", histogram)
    steps = len(histogram) - 1
    counts = []
    for length in range(1, steps + 2):
        number = histogram.get(str(length))
        if type(number) is not int or not 0 <= number <= MOST_COUNTED:
            raise _fail(path, f"accept_histogram[{length}]", "a number of cycles", number)
        counts.append(number)
    num_cycles = sum(counts)
    if steps < 1 or not num_cycles:
        raise _fail(path, "accept_histogram", "at least one draft and one cycle", histogram)
    # full[i] = cycles that accepted more than i drafts.
    full = [sum(counts[i + 1 :]) / num_cycles for i in range(steps)]
    cycle_ms = whole_cycle_ms(one, str(path))
    phases = one.get("phases_ms")
    notes = []
    if isinstance(phases, dict) and phases:
        inside = math.fsum(_number(path, phases, name) for name in phases)
        notes.append(
            f"of the cycle's {cycle_ms:.1f} ms, {inside:.1f} are in its phases ("
            + ", ".join(f"{name} {ms:.1f}" for name, ms in phases.items())
            + "); the rest lies between them"
        )
    notes.append(
        "the last cycle of a text may emit more than was asked for: measured speeds leave that out"
    )
    batch = count(str(path), "batch", report.get("batch", 1))
    if batch > 1:
        # A histogram counts requests' cycles; the loop's own are of all requests that are there.
        filled = num_cycles / one["num_cycles"]
        notes.append(f"of a batch of {batch}, {filled:.1f} requests were there in a cycle")
    by_nodes = one.get("cycles_by_nodes", {})
    if isinstance(by_nodes, dict) and len(by_nodes) > 1:
        notes.append(
            "rates are of cycles with different numbers of drafts: "
            + ", ".join(f"{num} of {nodes} nodes" for nodes, num in by_nodes.items())
        )
    kind = report["draft"].get("kind") if isinstance(report.get("draft"), dict) else None
    if kind not in (None, "chain"):
        notes.append(f"accuracies are by depth of a {kind} tree, not of a chain")
    if len(names) > 1:
        others = ", ".join(n for n in names if n != one["name"])
        notes.append(f"{path} also has the passes {others} (--series)")
    return Acceptance(
        f"{path}, {one.get('name')}, {num_cycles} cycles",
        tuple(full),
        viability.accept_length_estimate(full, num_cycles),
        steps,
        num_cycles,
        cycle_ms,
        1e3 * batch / _number(path, one, "plain_step_ms", 0),
        batch,
        tuple(notes),
    )


# Acceptance traces.


def trace_texts(path: Path | str, temperature: str | None = None) -> tuple[Trace, str]:
    """A trace's texts of one temperature (None = the lowest), and that temperature's name."""
    trace = Trace.load(path)
    known = [f"{t:g}" for t in trace.temperatures]
    name = known[0] if temperature is None else temperature
    if name not in known:
        raise _fail(path, "series", f"a temperature of {', '.join(known)}", name)
    return trace.at(trace.temperatures[known.index(name)]), name


def read_trace(
    path: Path | str, temperature: str | None = None, num_drafts: int | None = None
) -> Acceptance:
    """What chains would have accepted over recorded texts, by replay, cycle by cycle.

    Args:
        path: see ``planning/traces.py``.
        temperature: as text; None = the lowest in the file.
        num_drafts: None = as deep as was recorded.

    Raises:
        ValueError: no such trace, temperature, or depth.
    """
    trace, name = trace_texts(path, temperature)
    depth = trace.texts[0].ranks.shape[1]
    steps = depth if num_drafts is None else count("read_trace", "num_drafts", num_drafts)
    if steps > depth:
        raise _fail(path, "draft steps", f"at most {depth}, as recorded", str(steps))
    accepted = [n for t in trace.texts for n in accepted_by_cycle(t, chain_paths(steps))]
    num_cycles = len(accepted)
    full = [sum(n > i for n in accepted) / num_cycles for i in range(steps)]
    return Acceptance(
        f"{path}, temperature {name}, {len(trace.texts)} texts, {num_cycles} cycles",
        tuple(full),
        viability.accept_length_estimate(full, num_cycles),
        steps,
        num_cycles,
        notes=("drafts of a trace are the drafter's likeliest tokens, not draws",),
    )


# Engines' logs.

_FLOAT = r"(\d+(?:\.\d+)?)"
_VLLM = re.compile(r"SpecDecoding metrics:")
_VLLM_COUNTS = re.compile(r"Accepted: (\d+) tokens, Drafted: (\d+) tokens")
_VLLM_RATES = re.compile(r"Per-position acceptance rate: (\d[\d., ]*\d)")
_LLAMA = re.compile(
    r"draft acceptance = \S+ \(\s*(\d+) accepted /\s*(\d+) generated\)"
    r".*acceptance rate per position = \(([\d., ]+)\)"
)
_SGLANG = re.compile(
    rf"Decode batch.*#running-req: (\d+).*accept len: {_FLOAT}"
    rf"(?:, accept rate: {_FLOAT})?.*gen throughput \(token/s\): {_FLOAT}"
)


@dataclass(frozen=True)
class _Counted:
    """One line with counts: drafts accepted, tokens drafted, rates by position ("" = none)."""

    line: int
    num_accepted: int
    num_drafted: int
    rates: tuple[float, ...]


def _split(rates: str) -> tuple[float, ...]:
    return tuple(float(rate) for rate in rates.replace(",", " ").split())


def _span(numbers: Iterable[int]) -> str:
    numbers = list(numbers)
    if len(numbers) == 1:
        return f"line {numbers[0]}"
    return f"lines {numbers[0]} to {numbers[-1]} ({len(numbers)} of them)"


def read_engine_log(path: Path | str, num_drafts: int | None = None) -> Acceptance:
    """Acceptance counted by an engine, from its log; other lines are passed over.

    Understood: vLLM's ``SpecDecoding metrics`` lines (older ones without rates by position need
    ``num_drafts``), SGLang's ``Decode batch`` lines with ``accept len``, and llama.cpp's ``draft
    acceptance`` lines. In all three, the rate at a position is the share of all cycles that
    accepted it: the full accuracy.

    Raises:
        ValueError: no such line, lines of several engines, or numbers that contradict each other.
    """
    if num_drafts is not None:
        count("read_engine_log", "num_drafts", num_drafts)
    vllm, llama, sglang = [], [], []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if _VLLM.search(line):
            counts, rates = _VLLM_COUNTS.search(line), _VLLM_RATES.search(line)
            if counts is not None:
                values = _split(rates[1]) if rates else ()
                vllm.append(_Counted(number, int(counts[1]), int(counts[2]), values))
        elif match := _LLAMA.search(line):
            llama.append(_Counted(number, int(match[1]), int(match[2]), _split(match[3])))
        elif match := _SGLANG.search(line):
            # A batch that just began or ended logs an accept length of 0.
            if float(match[2]) >= 1 and float(match[4]) > 0 and int(match[1]) > 0:
                sglang.append((number, *match.groups()))
    found = {"vLLM": vllm, "llama.cpp": llama, "SGLang": sglang}
    engines = [name for name, lines in found.items() if lines]
    if len(engines) != 1:
        raise _fail(
            path,
            "lines",
            "lines of one engine: vLLM's 'SpecDecoding metrics', SGLang's 'Decode batch' with "
            "'accept len', llama.cpp's 'draft acceptance'",
            " and ".join(f"{len(found[name])} of {name}" for name in engines) or "none",
        )
    if sglang:
        return _from_sglang(path, sglang, num_drafts)
    return _from_counts(path, engines[0], vllm or llama, num_drafts)


def _from_counts(
    path: Path | str, engine: str, lines: list[_Counted], num_drafts: int | None
) -> Acceptance:
    lines = [one for one in lines if one.num_drafted]
    if not lines:
        raise _fail(path, "lines", f"{engine} lines with drafted tokens", "none drafted")
    positions = {len(one.rates) for one in lines}
    if len(positions) > 1:
        raise _fail(
            path, "positions", "one number of drafts throughout", ", ".join(map(str, positions))
        )
    steps = positions.pop()
    source = f"{path}, {engine}, {_span(one.line for one in lines)}"
    notes = ()
    if engine == "vLLM":
        notes = ("vLLM's tok/s include idle time, so no cycle time is taken from them",)
    if not steps:
        if num_drafts is None:
            raise _fail(path, "positions", "rates by position, or --draft-steps", "neither")
        accepted = sum(one.num_accepted for one in lines)
        drafted = sum(one.num_drafted for one in lines)
        length = 1 + num_drafts * accepted / drafted
        if not 1 <= length <= num_drafts + 1:
            raise _fail(
                path, "Accepted", f"at most Drafted = {drafted} tokens", f"{accepted} tokens"
            )
        return Acceptance(source, (), Estimate.exact(length), num_drafts, notes=notes)
    weights, table = [], []
    for one in lines:
        where = f"{path}: line {one.line}"
        values = rates(where, "rates by position", one.rates, falling=True)
        # Cycles: each accepted draft counts at one position. Short drafts make drafted / k less.
        weights.append(one.num_accepted / values.sum() if values.sum() else one.num_drafted / steps)
        table.append(values)
    num_cycles = max(1, round(sum(weights)))
    full = np.average(table, axis=0, weights=weights)
    return Acceptance(
        f"{source}, {num_cycles} cycles",
        tuple(full.tolist()),
        viability.accept_length_estimate(full, num_cycles),
        steps,
        num_cycles,
        notes=notes,
    )


def _from_sglang(
    path: Path | str, lines: list[tuple[int, str, str, str | None, str]], num_drafts: int | None
) -> Acceptance:
    """Each line is a mean over as many forwards as every other, of one batch size."""
    batch, _ = Counter(int(running) for _, running, *_ in lines).most_common(1)[0]
    kept = [one for one in lines if int(one[1]) == batch]
    lengths = np.array([float(one[2]) for one in kept])
    speeds = np.array([float(one[4]) for one in kept])
    value = float(lengths.mean())
    shares = [(float(a) - 1) / float(r) for _, _, a, r, _ in kept if r and float(r) > 0]
    if num_drafts is None and shares:
        # accept rate = (accept len - 1) / drafts, both rounded.
        num_drafts = max(1, round(float(np.median(shares))), math.ceil(lengths.max() - 1))
    most = math.inf if num_drafts is None else num_drafts + 1
    if value > most:
        raise _fail(path, "accept len", f"at most {most} with {num_drafts} drafts", value)
    length = Estimate.exact(value)
    if len(kept) > 1:
        half = 1.96 * float(lengths.std(ddof=1)) / math.sqrt(len(kept))
        length = Estimate(value, max(1.0, value - half), min(most, value + half))
    notes = ["the interval is from the spread between lines"] if len(kept) > 1 else []
    if len(kept) < len(lines):
        notes.append(
            f"{len(lines) - len(kept)} lines of another batch size than {batch} are left out"
        )
    notes.append(
        "cycle time = running requests x accept length / generation throughput, the median line's; "
        "prefills in between make it longer"
    )
    return Acceptance(
        f"{path}, SGLang, {_span(one[0] for one in kept)}",
        (),
        length,
        num_drafts,
        cycle_ms=float(np.median(1e3 * batch * lengths / speeds)),
        batch=batch,
        notes=tuple(notes),
    )
