"""Muon (Jordan et al. 2024) whose products have a chosen precision: torch's are bfloat16 always."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

_MOMENTUM = 0.95
_ROUNDS, _A, _B, _C = 5, 3.4445, -4.7750, 2.0315


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """About the nearest matrix with singular values of 1, by Newton and Schulz's iteration."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(_ROUNDS):
        square = x @ x.T
        x = _A * x + (_B * square + _C * square @ square) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Descent along the orthogonal part of the momentum (Nesterov's), with decay of the weights.

    Updates have the root mean square that Adam's have.
    """

    def __init__(
        self, matrices: Iterable[torch.Tensor], weight_decay: float, dtype: torch.dtype
    ) -> None:
        super().__init__(matrices, {"lr": 0.0, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Move each matrix by its gradient."""
        for group in self.param_groups:
            rate = group["lr"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                momentum = state["momentum"].lerp_(matrix.grad, 1 - _MOMENTUM)
                update = orthogonal(matrix.grad.lerp(momentum, _MOMENTUM).to(self._dtype))
                matrix.mul_(1 - rate * group["weight_decay"])
                scale = 0.2 * math.sqrt(max(matrix.shape))
                matrix.add_(update.to(matrix.dtype), alpha=-rate * scale)


def muon_and_adam(
    parts: Iterable[torch.nn.Module],
    every: Iterable[torch.nn.Parameter],
    weight_decay: float,
    dtype: torch.dtype,
) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices of some parts, Adam for the others of all parameters.

    Updates of both have the same root mean square, so one rate serves both.
    """
    inner = [p for part in parts for p in part.parameters() if p.ndim == 2]
    chosen = {id(p) for p in inner}
    outer = [p for p in every if id(p) not in chosen]
    adam = torch.optim.AdamW(outer, betas=(0.9, 0.98), weight_decay=0.0)
    return Muon(inner, weight_decay, dtype), adam
