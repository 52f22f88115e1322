"""Sampling parameters of requests, as the tensors that ``tree_verify`` reads, and drafts' coins."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from spec_kernels.ops.tree_verify import Purpose, philox4x32


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen.

    Args:
        temperature: 0 = greedy.
        top_k: 0 = off.
        top_p: in (0, 1]; 1 = off.
        min_p: in [0, 1]; 0 = off.
        seed: of the request's coins; with the position of a token it fixes the token.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self):
        def check(name: str, ok: bool, expected: str) -> None:
            if not ok:
                raise ValueError(
                    f"sampling: {name}: expected {expected}, got {getattr(self, name)}"
                )

        # The ops hold float32 and int64.
        finite = 0 <= self.temperature <= torch.finfo(torch.float32).max
        check("temperature", finite, "a finite number >= 0")
        check("top_k", 0 <= self.top_k < 2**63, "an integer >= 0 of 64 bits")
        check("top_p", 0 < self.top_p <= 1, "a number in (0, 1]")
        check("min_p", 0 <= self.min_p <= 1, "a number in [0, 1]")
        check("seed", -(2**63) <= self.seed < 2**63, "a 64-bit integer")


def draft_coins(seed: int, positions: range, num_draws: int) -> Tensor:
    """``[positions, draws]`` float64 in [0, 1): one coin for each draw of a token's drafts."""
    low = 0xFFFFFFFF
    position = torch.arange(positions.start, positions.stop).unsqueeze(1)
    ordinal = torch.arange(num_draws).expand(len(positions), -1)
    counter = (position & low, position >> 32, torch.tensor(int(Purpose.DRAFT)), ordinal)
    return philox4x32(counter, (seed & low, seed >> 32 & low))[0].double() / 2.0**32


def draw(probs: Tensor, coins: Tensor) -> Tensor:
    """Draws from each row one after the other without replacement.

    Args:
        probs: ``[rows, V]`` float32 in [0, 1]. Weights are multiples of 2^-40, as in
            ``tree_verify``, so that every rank draws the same in whatever order it adds.
        coins: ``[rows, draws]`` float64 of 32 bits, see ``draft_coins``: a token's probability is
            right to 2^-32.

    Returns:
        ``[rows, draws]`` int64. When nothing is left to draw, or a row holds NaN, any id.
    """
    weights = (probs * 2.0**40).to(torch.int64)
    drawn = []
    for coin in coins.split(1, 1):
        if drawn:
            weights = weights.scatter(1, drawn[-1], 0)
        cumulative = weights.cumsum(1)
        below = (cumulative[:, -1:] * coin).to(torch.int64)
        found = torch.searchsorted(cumulative, below, right=True)
        drawn.append(found.clamp_(max=probs.shape[1] - 1))
    return drawn[0] if len(drawn) == 1 else torch.cat(drawn, 1)


class SamplingTensors:
    """Static tensors ``[B]``; a greedy request is one of temperature 0.

    Args:
        num_positions, num_draws: room for the coins of drafts, laid down when a request is set.
    """

    def __init__(self, batch: int, device, num_positions: int = 0, num_draws: int = 0):
        self.temperature = torch.zeros(batch, device=device)
        self.top_k = torch.zeros(batch, dtype=torch.int64, device=device)
        self.top_p = torch.ones(batch, device=device)
        self.min_p = torch.zeros(batch, device=device)
        self.seeds = torch.zeros(batch, dtype=torch.int64, device=device)
        size = (batch, num_positions, num_draws)
        self.coins = torch.zeros(size, dtype=torch.float64, device=device)
        self._samples = [False] * batch

    @property
    def any_sampled(self) -> bool:
        """Whether a request has a temperature, as the host knows it."""
        return any(self._samples)

    @property
    def any_greedy(self) -> bool:
        return not all(self._samples)

    def set(self, request: int, params: SamplingParams, positions: range | None = None) -> None:
        """``positions``: those of the tokens that may be drafted."""
        self._samples[request] = params.temperature > 0
        num_draws = self.coins.shape[2]
        if positions is not None and params.temperature > 0 and num_draws:
            coins = draft_coins(params.seed, positions, num_draws)
            self.coins[request, positions.start : positions.stop] = coins.to(self.coins.device)
        self.temperature[request] = params.temperature
        self.top_k[request] = params.top_k
        self.top_p[request] = params.top_p
        self.min_p[request] = params.min_p
        self.seeds[request] = params.seed

    def arguments(self, request: int | None = None) -> dict[str, torch.Tensor]:
        """Keyword arguments of ``tree_verify``, of all requests or of one."""
        rows = slice(None) if request is None else slice(request, request + 1)
        return {
            "temperature": self.temperature[rows],
            "top_k": self.top_k[rows],
            "top_p": self.top_p[rows],
            "min_p": self.min_p[rows],
            "seeds": self.seeds[rows],
        }
