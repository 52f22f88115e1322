"""What ranks do together, written once: a generator that yields what the others must know.

A step yields a JSON-able value and is sent the list of every rank's. ``run_alone`` runs one rank's
steps and meets the others through a communicator; ``run_together`` runs all ranks' in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[object, list, Result]


def stage(what: str, function: Callable[[], object]) -> Steps[list]:
    """Runs ``function``; returns what it returned on every rank, or raises on all of them.

    The rank whose ``function`` raised raises that; the others a RuntimeError that names it.
    """
    value, failure = None, None
    try:
        value = function()
    except Exception as error:  # noqa: BLE001 - raised below, once the peers know of it
        failure = error
    told = yield {"value": value, "error": failure and f"{type(failure).__name__}: {failure}"}
    if failure is not None:
        raise failure
    errors = [f"rank {rank}: {t['error']}" for rank, t in enumerate(told) if t["error"]]
    if errors:
        raise RuntimeError(f"{what}: {'; '.join(errors)}")
    return [t["value"] for t in told]


def run_alone(steps: Steps[Result], meet: Callable[[object], list]) -> Result:
    """One rank's ``steps``. ``meet(value)`` gives every rank's; what it raises the steps hear."""
    step, argument = steps.send, None
    try:
        while True:
            told = step(argument)
            try:
                step, argument = steps.send, meet(told)
            except RuntimeError as error:
                step, argument = steps.throw, error
    except StopIteration as end:
        return end.value


def run_together(ranks: Sequence[Steps[Result]]) -> list[Result]:
    """All ranks' steps, in turns until all have ended. Raises what the first to fail raised."""
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    answers: list[object] | None = None
    while len(results) < len(ranks):
        told: list[object] = [None] * len(ranks)
        for rank, steps in enumerate(ranks):
            if rank in results:
                continue
            try:
                told[rank] = steps.send(answers and list(answers))
            except StopIteration as end:
                results[rank] = end.value
            except Exception as error:  # noqa: BLE001 - raised below
                results[rank] = None
                errors.append(error)
        answers = told
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(len(ranks))]
