"""Sampling parameters of requests, as the tensors that ``tree_verify`` reads."""

from __future__ import annotations

import dataclasses

import torch


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


class SamplingTensors:
    """Static tensors ``[B]``; a greedy request is one of temperature 0."""

    def __init__(self, batch: int, device):
        self.temperature = torch.zeros(batch, device=device)
        self.top_k = torch.zeros(batch, dtype=torch.int64, device=device)
        self.top_p = torch.ones(batch, device=device)
        self.min_p = torch.zeros(batch, device=device)
        self.seeds = torch.zeros(batch, dtype=torch.int64, device=device)

    def set(self, request: int, params: SamplingParams) -> None:
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
