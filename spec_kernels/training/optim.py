"""Muon for the matrices, AdamW for the rest."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_NEWTON_SCHULZ_STEPS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(update: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrices, roughly: update [..., M, N], bfloat16 inside.

    The quintic Newton-Schulz iteration of Muon (K. Jordan, 2024): singular values end in about
    [0.7, 1.2], which is as good as 1 for an optimiser and needs only matrix products.
    """
    a, b, c = _COEFFICIENTS
    x = update.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if is_tall else x).float()


class Optimizer:
    """One learning rate for both halves.

    Muon's update is scaled by 0.2 sqrt(max(M, N)) (arXiv 2502.16982), which gives it the size of an
    AdamW update. Weight decay is decoupled and spares vectors.
    """

    def __init__(
        self,
        model: nn.Module,
        uses_muon,
        weight_decay: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
    ):
        """``uses_muon(name, parameter)``: whether a parameter is one or a stack of matrices."""
        self.weight_decay, self.momentum, self.betas = weight_decay, momentum, betas
        self.muon: dict[str, nn.Parameter] = {}
        self.adam: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                (self.muon if uses_muon(name, parameter) else self.adam)[name] = parameter
        self.buffers = {name: torch.zeros_like(p) for name, p in self.muon.items()}
        self.first = {name: torch.zeros_like(p) for name, p in self.adam.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.adam.items()}
        self.num_steps = 0

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in (*self.muon.values(), *self.adam.values())]

    @torch.no_grad()
    def step(self, rate: float, max_norm: float = 1.0) -> float:
        """One update; clears the gradients and returns their norm before clipping."""
        self.num_steps += 1
        parameters = [*self.muon.values(), *self.adam.values()]
        norm = nn.utils.clip_grad_norm_(parameters, max_norm).item()
        by_shape: dict[torch.Size, list[str]] = {}
        for name, parameter in self.muon.items():
            by_shape.setdefault(self._matrix_shape(name, parameter), []).append(name)
        for shape, names in by_shape.items():
            self._muon_step(shape, names, rate)
        for name, parameter in self.adam.items():
            self._adam_step(name, parameter, rate)
        for parameter in parameters:
            parameter.grad = None
        return norm

    @staticmethod
    def _matrix_shape(name: str, parameter: Tensor) -> torch.Size:
        """gate_up stacks two matrices along its rows: each is orthogonalised by itself."""
        rows, cols = parameter.shape[-2:]
        return torch.Size((rows // 2 if name.endswith("gate_up") else rows, cols))

    def _muon_step(self, shape: torch.Size, names: list[str], rate: float) -> None:
        stacks = []
        for name in names:
            gradient, buffer = self.muon[name].grad, self.buffers[name]
            buffer.lerp_(gradient, 1.0 - self.momentum)
            stacks.append(gradient.lerp(buffer, self.momentum).reshape(-1, *shape))
        updates = orthogonalise(torch.cat(stacks)) * (0.2 * max(shape) ** 0.5)
        for name, update in zip(names, updates.split([len(s) for s in stacks]), strict=True):
            parameter = self.muon[name]
            parameter.mul_(1.0 - rate * self.weight_decay)
            parameter.sub_(update.reshape(parameter.shape), alpha=rate)

    def _adam_step(self, name: str, parameter: Tensor, rate: float) -> None:
        beta1, beta2 = self.betas
        first, second = self.first[name], self.second[name]
        first.lerp_(parameter.grad, 1.0 - beta1)
        second.lerp_(parameter.grad.square(), 1.0 - beta2)
        corrected = (second / (1.0 - beta2**self.num_steps)).sqrt_().add_(1e-10)
        if parameter.ndim > 1:
            parameter.mul_(1.0 - rate * self.weight_decay)
        parameter.addcdiv_(first, corrected, value=-rate / (1.0 - beta1**self.num_steps))

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The state but for ``num_steps``, by kind and parameter name."""
        return {"buffers": self.buffers, "first": self.first, "second": self.second}

    def load(self, saved: dict[str, dict[str, Tensor]]) -> None:
        """Copies what ``tensors`` of an optimizer for the same parameters gave."""
        for part, values in self.tensors().items():
            for name, value in values.items():
                value.copy_(saved[part][name])
