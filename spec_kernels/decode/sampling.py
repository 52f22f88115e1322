"""Sampling parameters of requests, as the tensors that ``tree_verify`` reads."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from spec_kernels.decode.kv_cache import pinned


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen.

    Args:
        temperature: 0 = greedy.
        top_k: 0 = off.
        top_p: in (0, 1]; 1 = off.
        min_p: in [0, 1]; 0 = off.
        seed: of the request's coins; with the position of a token it fixes the token.
        logit_bias: what is added to the logits of some ids (``SamplingOptions.logit_bias``): -inf
            forbids one, and of those with +inf one is chosen.
        allowed: the only ids that may be chosen; None = all (``SamplingOptions.allowed``).

    Ids are kept as they were when this was made, whatever becomes of the caller's container.

    Raises:
        ValueError: a number is of another kind or range, in the formats of the ops.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logit_bias: Mapping[int, float] | None = None
    allowed: Sequence[int] | None = None

    def __post_init__(self):
        def check(name: str, ok: Callable[[Any], bool], expected: str) -> None:
            value = getattr(self, name)
            try:
                is_sound = bool(ok(value))
            except (TypeError, ValueError, OverflowError):
                is_sound = False
            if not is_sound:
                raise ValueError(f"sampling: {name}: expected {expected}, got {value!r}")

        # The ops hold float32 and int64.
        most, least = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
        check("temperature", lambda t: 0 <= t <= most, "a finite number >= 0")
        check("top_k", lambda k: 0 <= operator.index(k) < 2**63, "an integer >= 0 of 64 bits")
        check("top_p", lambda p: least <= p <= 1, f"a number in (0, 1], from {least:.2g} on")
        check("min_p", lambda p: 0 <= p <= 1, "a number in [0, 1]")
        check("seed", lambda s: -(2**63) <= operator.index(s) < 2**63, "a 64-bit integer")
        if self.allowed is not None:
            allowed = integers("sampling: allowed", self.allowed)
            object.__setattr__(self, "allowed", allowed)
            check("allowed", len, "at least one id, or None")
        if self.logit_bias is not None:
            check(
                "logit_bias",
                lambda biases: all(abs(b) <= most or math.isinf(b) for b in dict(biases).values()),
                "numbers of float32 by id",
            )
            biases = dict(self.logit_bias)
            ids = integers("sampling: logit_bias", biases)
            object.__setattr__(self, "logit_bias", dict(zip(ids, biases.values(), strict=True)))


def integers(what: str, ids: Iterable[SupportsIndex]) -> tuple[int, ...]:
    """``ids`` as integers of Python; ValueError that begins with ``what`` if they are no integers.

    Anything else that compares like one would be rounded where it is stored in a tensor.
    """
    try:
        return tuple(map(operator.index, ids))
    except TypeError as error:
        raise ValueError(f"{what}: expected integers, got {ids!r:.80}") from error


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """What requests may ask for beyond their parameters: settled when buffers are allocated.

    Args:
        logit_bias: requests may bring biases: ``[max_requests, V]`` float32 are kept for them.
        allowed: requests may bring the ids that they allow: a bit for each id and request.
        typical: (epsilon, delta) of typical acceptance for all requests, see ``tree_verify``: it is
            lossy, the text is no longer distributed as the target's. Not with drawn drafts.
    """

    logit_bias: bool = False
    allowed: bool = False
    typical: tuple[float, float] | None = None

    def __post_init__(self):
        if self.typical is None:
            return
        epsilon, delta = self.typical
        if not (0 < epsilon <= 1 and 0 < delta < math.inf):
            raise ValueError(
                "sampling: typical: expected epsilon in (0, 1] and a finite delta > 0, got "
                f"{self.typical}"
            )


@dataclasses.dataclass
class SamplingTensors:
    """One row a request; a greedy one is of temperature 0.

    Attributes:
        temperature, top_p, min_p: ``[B]`` float32; top_k, seeds: ``[B]`` int64.
        logit_bias: ``[B, V]`` float32, or None where requests may bring none.
        allowed: ``[B, 1, ceil(V / 32)]`` int32 words, or None.
        typical: as in ``SamplingOptions``.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    logit_bias: Tensor | None = None
    allowed: Tensor | None = None
    typical: tuple[float, float] | None = None

    @classmethod
    def allocate(
        cls, batch: int, vocab_size: int, device, options: SamplingOptions | None = None
    ) -> SamplingTensors:
        options = options or SamplingOptions()
        words = -(-vocab_size // 32)
        every = (batch, 1, words)
        return cls(
            temperature=torch.zeros(batch, dtype=torch.float32, device=device),
            top_k=torch.zeros(batch, dtype=torch.int64, device=device),
            top_p=torch.ones(batch, dtype=torch.float32, device=device),
            min_p=torch.zeros(batch, dtype=torch.float32, device=device),
            seeds=torch.zeros(batch, dtype=torch.int64, device=device),
            logit_bias=torch.zeros(batch, vocab_size, dtype=torch.float32, device=device)
            if options.logit_bias
            else None,
            allowed=torch.full(every, -1, dtype=torch.int32, device=device)
            if options.allowed
            else None,
            typical=options.typical,
        )

    def check(self, params: SamplingParams, vocab_size: int) -> None:
        """ValueError where ``params`` ask for what there is no room for."""
        for name, ids, room in (
            ("logit_bias", params.logit_bias, self.logit_bias),
            ("allowed", params.allowed, self.allowed),
        ):
            if ids is None:
                continue
            if room is None:
                raise ValueError(
                    f"sampling: {name}: expected none, since the engine was made without "
                    f"SamplingOptions({name}=True), got {len(ids)} ids"
                )
            wrong = [i for i in ids if not 0 <= i < vocab_size]
            if wrong:
                raise ValueError(
                    f"sampling: {name}: expected ids in [0, {vocab_size}), got {wrong[0]}"
                )

    def set(self, row: int, params: SamplingParams) -> None:
        # fill_ takes its value along with the launch; an assignment would copy from the host.
        self.temperature[row].fill_(params.temperature)
        self.top_k[row].fill_(params.top_k)
        self.top_p[row].fill_(params.top_p)
        self.min_p[row].fill_(params.min_p)
        self.seeds[row].fill_(params.seed)
        if self.logit_bias is not None:
            self.logit_bias[row].zero_()
            for token, bias in (params.logit_bias or {}).items():
                self.logit_bias[row, token].fill_(bias)
        if self.allowed is not None:
            if params.allowed is None:
                self.allowed[row].fill_(-1)
            else:
                words = _words(params.allowed, self.allowed.shape[2])
                self.allowed[row].copy_(pinned(words, self.allowed.device), True)

    def rows(self, rows: slice) -> SamplingTensors:
        """The same of some requests, as views."""
        views = {
            f.name: value[rows] if isinstance(value, Tensor) else value
            for f in dataclasses.fields(self)
            for value in [getattr(self, f.name)]
        }
        return SamplingTensors(**views)

    def arguments(self, num_nodes: int) -> dict[str, object]:
        """Keyword arguments of ``tree_verify`` for trees of ``num_nodes``."""
        allowed = self.allowed
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seeds": self.seeds,
            "logit_bias": self.logit_bias,
            "allowed": None if allowed is None else allowed.expand(-1, num_nodes, -1),
            "typical": self.typical,
        }


def _words(ids: Sequence[int], num_words: int) -> Tensor:
    words = [0] * num_words
    for i in ids:
        words[i // 32] |= 1 << (i % 32)
    # int32 words are bit patterns: bit 31 is the sign.
    signed = [w - (w >> 31 << 32) for w in words]
    return torch.tensor(signed, dtype=torch.int32, device="cpu").unsqueeze(0)
