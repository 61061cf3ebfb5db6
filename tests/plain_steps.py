"""Training steps in plain PyTorch, as a reference for tpufit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn
from torch.optim import Optimizer


def plain_steps(
    net: nn.Module,
    optimizer: Optimizer,
    loss: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
) -> list[float]:
    """Take a step for each batch, and return the losses."""
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        value = loss(net(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses
