"""Users' losses that index, set, sort or pair the rows of a batch: `o` are logits, `y` labels."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def order(y, **kwargs):
    return torch.arange(len(y), device=y.device, **kwargs)


def some(y, share=2):
    return max(len(y) // share, 1)


def zeros(o, *shape):
    return torch.zeros(shape, device=o.device)


def picked(o, y):
    return o.log_softmax(-1)[order(y), y].mean()


def margins(o, y):
    z = o.clone()
    z[order(y), y] -= 0.5
    return F.cross_entropy(z, y)


def rows_set(o, y):
    z = o.clone()
    z[order(y).flip(0)] = o
    return z.cumsum(0).square().mean()


def masked_rows_set(o, y):
    z = o.clone()
    z[y > 1] = 0
    return z.square().mean()


def first_and_last_set(o, y):
    z = o.clone()
    z[0] = 0
    z[-1] += 1
    return z.cumsum(0).square().mean()


def views_of_rows(o, y):
    z = F.normalize(torch.cat([o, 2 * o + 1]))
    itself = torch.eye(len(z), dtype=torch.bool, device=o.device)
    return F.cross_entropy((z @ z.t()).masked_fill(itself, -1e9), torch.arange(len(z), device=o.device).roll(len(y)))


def hardest_pairs(o, y):
    apart = (o[:, None] - o[None]).square().sum(-1)
    same = y[:, None] == y[None]
    far, near = apart.masked_fill(~same, -1e9).amax(1), apart.masked_fill(same, 1e9).amin(1)
    return F.relu(far - near.clamp(max=1e3) + 1).mean()


def class_means(o, y):
    counts = zeros(o, 4).index_add(0, y, torch.ones_like(y, dtype=o.dtype)).clamp(min=1)
    return (zeros(o, 4, 4).index_add(0, y, o) / counts[:, None])[y].sub(o).square().mean()


def survival(o, y):
    risk = o[:, 0][o[:, 0].detach().argsort()]
    return risk.logsumexp(0) - risk.exp().cumsum(0).log().mean()


KINDS = {
    "one-hot by scatter_": lambda o, y: -(torch.zeros_like(o).scatter_(1, y[:, None], 1.0) * o.log_softmax(-1)).mean(),
    "gather": lambda o, y: -o.log_softmax(-1).gather(1, y[:, None]).mean(),
    "index": picked,
    "index of 32 bits": lambda o, y: o[order(y, dtype=torch.int32), y.int()].square().mean(),
    "negative index": lambda o, y: o[order(y) - len(y), y - 4].square().mean(),
    "one column for all": lambda o, y: o[order(y), y[0]].square().mean() + o[y[-1] % len(y)].mean(),
    "take_along_dim": lambda o, y: torch.take_along_dim(o, y[:, None], 1).square().mean(),
    "take": lambda o, y: torch.take(o, order(y) * 4 + y).square().mean(),
    "index_select": lambda o, y: o.index_select(0, y % len(y)).square().mean(),
    "index_add_": lambda o, y: zeros(o, 4, 4).index_add_(0, y, o).square().mean(),
    "index_add of 32 bits": lambda o, y: zeros(o, 4, 4).index_add(0, y.int(), o).square().mean(),
    "index_copy": lambda o, y: torch.zeros_like(o).index_copy(0, order(y).flip(0), o).cumsum(0).square().mean(),
    "index_copy of columns": lambda o, y: torch.zeros_like(o).index_copy(-1, 3 - order(o[0]), o)[:, 0].mean(),
    "index_fill": lambda o, y: o.index_fill(0, y % len(y), 0.5).square().mean(),
    "index_put": lambda o, y: o.clone().index_put((order(y), y), zeros(o)).square().mean(),
    "index_put that adds": lambda o, y: zeros(o, 4, 4).index_put((y,), o, accumulate=True).square().mean(),
    "scatter_add": lambda o, y: zeros(o, 4, 4).scatter_add_(0, y[:, None].expand(-1, 4), o).square().mean(),
    "scatter_reduce": lambda o, y: zeros(o, 4, 4).scatter_reduce(0, y[:, None].expand(-1, 4), o, "amax").mean(),
    "a margin at the label": margins,
    "rows that are set": rows_set,
    "masked rows that are set": masked_rows_set,
    "first and last row that are set": first_and_last_set,
    "embedding": lambda o, y: F.embedding(y, torch.ones_like(o[:1]).expand(4, 4) * o.mean(0)).square().mean(),
    "a table": lambda o, y: (zeros(o, 9, 4) + o.mean(0))[y].sub(o).square().mean(),
    "one_hot": lambda o, y: -(F.one_hot(y, 4) * o.log_softmax(-1)).sum(1).mean(),
    "nll_loss": lambda o, y: F.nll_loss(o.log_softmax(-1), y),
    "class weights by bincount": lambda o, y: (o.logsumexp(1) * y.bincount(minlength=4)[y]).mean(),
    "class means": class_means,
    "half of the rows": lambda o, y: picked(o[: some(y)], y[: some(y)]),
    "a third of the rows": lambda o, y: o[: some(y, 3)].log_softmax(-1).gather(1, y[: some(y, 3), None]).mean(),
    "every other row": lambda o, y: picked(o[::2], y[::2]),
    "all rows but one": lambda o, y: picked(o[len(y) > 1 :], y[len(y) > 1 :]),
    "rows and one more": lambda o, y: picked(torch.cat([o, o[:1]]), torch.cat([y, y[:1]])),
    "padded rows": lambda o, y: picked(F.pad(o, (0, 0, 0, 3)), F.pad(y, (0, 3))),
    "rows in pieces": lambda o, y: sum(picked(*part) for part in zip(o.split(5), y.split(5), strict=True)),
    "repeated rows": lambda o, y: picked(o.repeat(3, 1), y.repeat(3)),
    "rows repeated one by one": lambda o, y: picked(o.repeat_interleave(2, 0), y.repeat_interleave(2)),
    "flipped rows": lambda o, y: F.cross_entropy(0.5 * o + 0.5 * o.flip(0), y.flip(0)),
    "rolled rows": lambda o, y: F.cross_entropy(0.5 * o + 0.5 * o.roll(1, 0), y.roll(1, 0)),
    "reordered rows": lambda o, y: F.cross_entropy(0.5 * o + 0.5 * o[order(y).flip(0)], y),
    "sorted rows": lambda o, y: picked(o.sort(0).values[: some(y)], y[: some(y)]),
    "rows by argsort": lambda o, y: o[o[:, 0].argsort()][: some(y)].square().mean(),
    "topk": lambda o, y: F.cross_entropy(o, y, reduction="none").topk(some(y)).values.mean(),
    "rows of topk": lambda o, y: picked(o[o[:, 0].topk(some(y)).indices], y[: some(y)]),
    "kthvalue": lambda o, y: o[:, 0].kthvalue(len(y) // 2 + 1).values.square(),
    "largest row": lambda o, y: o.max(0).values.mean() + o[o[:, 0].argmax()].mean(),
    "cumsum": lambda o, y: o.cumsum(0).square().mean(),
    "survival": survival,
    "cdist": lambda o, y: torch.cdist(o, o.detach() + 1).mean(),
    "contrastive": lambda o, y: F.cross_entropy(F.normalize(o) @ F.normalize(o).t(), order(y)),
    "two views": views_of_rows,
    "hardest pairs": hardest_pairs,
    "pairs by index": lambda o, y: (o @ o.t())[order(y), y % len(y)].mean(),
    "diagonal": lambda o, y: (o @ o.t()).diagonal().mean(),
    "unfold": lambda o, y: o.unfold(0, min(2, len(y)), 1).square().mean(),
    "flat rows": lambda o, y: o.flatten()[order(y) * 4 + y].square().mean(),
    "last of a time": lambda o, y: o.view(-1, 2, 2)[order(y), y % 2].square().mean(),
    "transposed": lambda o, y: o.t().gather(0, y[None]).mean(),
    "rows of a mask": lambda o, y: o[y < 2].square().sum(),
    "max_unpool": lambda o, y: F.max_unpool1d(*F.max_pool1d(o[:, None], 2, return_indices=True), 2).square().mean(),
}  # fmt: skip
