"""The trainings of some examples as loops in plain PyTorch, and comparisons of the results.

A loop gets an example's variables by name, trains the same new network on the host, and compares. Both read rows in
order, and draw no random numbers after the initialization; see `without_chance`.
"""

import csv
import functools
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, SequentialSampler
from torchmetrics import JaccardIndex

import tpufit

Example = dict[str, Any]


class NoDropout(nn.Dropout):
    def __init__(self, p: float = 0.0, inplace: bool = False) -> None:
        super().__init__(0.0, inplace)


def numbers(*shape: int, device: str | torch.device = "cpu") -> Tensor:
    """Return pseudo-random numbers of a shape, the same each time."""
    return torch.arange(float(np.prod(shape)), device=device).reshape(shape).sin()


def without_chance() -> None:
    """Make this process deterministic: no dropout, no shuffling, and fixed noise."""
    nn.Dropout = NoDropout
    torch.randn = numbers
    torch.utils.data.dataloader.RandomSampler = lambda data, **others: SequentialSampler(data)
    tpufit.Model.fit = functools.partialmethod(tpufit.Model.fit, shuffle=False)


def same(ours: Any, plain: Any, tolerance: float) -> None:
    np.testing.assert_allclose(np.asarray(ours), np.asarray(plain), rtol=0, atol=tolerance)


def segmentation(example: Example) -> None:
    history, epochs = example["history"].history, example["args"].epochs
    x, y, x_test, y_test = (torch.from_numpy(example[name]) for name in ("x", "y", "x_test", "y_test"))
    torch.manual_seed(0)
    net = example["UNet"]()
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    losses = []
    for _ in range(epochs):
        net.train()
        losses.append([])
        for images, masks in zip(x.split(32), y.split(32), strict=True):
            loss = F.cross_entropy(net(images), masks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    with torch.no_grad():
        logits = net.eval()(x_test)
    same(history["loss"], np.mean(losses, 1), 1e-3)
    same(history["val_loss"][-1], F.cross_entropy(logits, y_test), 1e-3)
    same(history["val_accuracy"][-1], (logits.argmax(1) == y_test).float().mean(), 1e-3)
    same(history["val_iou"][-1], JaccardIndex("multiclass", num_classes=3)(logits, y_test), 1e-3)


def contrastive(example: Example) -> None:
    upper, lower = (torch.from_numpy(example[name]) for name in ("upper", "lower"))
    torch.manual_seed(0)
    net = example["Halves"]()
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    losses = []
    for _ in range(example["args"].epochs):
        losses.append([])
        for tops, bottoms in zip(upper[:1600].split(200), lower[:1600].split(200), strict=True):
            a, b = net(tops, bottoms)
            similar = a @ b.T * net.log_scale.exp()
            own = torch.arange(200)
            loss = (F.cross_entropy(similar, own) + F.cross_entropy(similar.T, own)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    with torch.no_grad():
        outputs = net(upper[1600:1700], lower[1600:1700])
    same(example["history"].history["loss"], np.mean(losses, 1), 1e-4)
    same(example["of_upper"], outputs[0], 1e-4)
    same(example["of_lower"], outputs[1], 1e-4)


def kfold(example: Example) -> None:
    x, y, x_test = (example[name] for name in ("x", "y", "x_test"))
    out_of_fold, submission = np.zeros(len(x)), np.zeros(len(x_test))
    stopped = 0
    for fold, (train, held_out) in enumerate(StratifiedKFold(5, shuffle=True, random_state=0).split(x, y)):
        scaler = StandardScaler().fit(x[train])
        rows, valid, test = (torch.from_numpy(scaler.transform(some)) for some in (x[train], x[held_out], x_test))
        targets, valid_targets = torch.from_numpy(y[train]), torch.from_numpy(y[held_out])
        torch.manual_seed(fold)
        net = example["network"]()
        optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
        best, best_weights, waited = float("inf"), {}, 0
        for _ in range(example["args"].epochs):
            for some, wanted in zip(rows.split(32), targets.split(32), strict=True):
                optimizer.zero_grad()
                F.binary_cross_entropy_with_logits(net(some), wanted).backward()
                optimizer.step()
            with torch.no_grad():
                loss = F.binary_cross_entropy_with_logits(net(valid), valid_targets).item()
            waited += 1
            if loss < best:
                best, waited = loss, 0
                best_weights = {name: value.clone() for name, value in net.state_dict().items()}
            if waited == 5:
                stopped += 1
                break
        net.load_state_dict(best_weights)
        with torch.no_grad():
            out_of_fold[held_out] = net(valid).sigmoid()
            submission += net(test).sigmoid().numpy() / 5
    assert stopped  # otherwise early stopping wouldn't be compared
    same(example["out_of_fold"], out_of_fold, 1e-3)
    with open("submission.csv", newline="") as file:
        written = [(int(row["id"]), float(row["target"])) for row in csv.DictReader(file)]
    assert [number for number, _ in written] == list(example["ids"])
    same([value for _, value in written], submission, 1e-3)


def bert(example: Example) -> None:
    collate = example["collate"]
    torch.manual_seed(0)
    net = example["BertForSequenceClassification"](example["config"])
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    losses = []
    for _ in range(example["args"].epochs):
        losses.append([])
        for number, batch in enumerate(DataLoader(example["train"], 16, collate_fn=collate), 1):
            del batch["text"]
            loss = net(**batch).loss
            (loss / 2).backward()  # half of the rows of a step
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            losses[-1].append(loss.item())
    test = collate(example["test"])
    del test["text"]
    with torch.no_grad():
        outputs = net.eval()(**test)
    same(example["history"].history["loss"], np.mean(losses, 1), 1e-3)
    same(example["loss"], outputs.loss, 1e-3)
    same(example["logits"], outputs.logits[:4], 1e-2)


def gan(example: Example) -> None:
    digits = torch.from_numpy(example["digits"])
    torch.manual_seed(0)
    rivals = example["Rivals"]()
    optimizer, critics_optimizer = (
        torch.optim.Adam(part.parameters(), 1e-3, betas=(0.5, 0.999)) for part in (rivals.generator, rivals.critic)
    )
    losses = []
    for _ in range(example["args"].epochs):
        losses.append([])
        for real in digits.split(64):
            drawn = rivals.generator(numbers(len(real), 16))
            on_drawn = rivals.critic(drawn.detach())
            critics_loss = F.softplus(-rivals.critic(real)).mean() + F.softplus(on_drawn).mean()
            critics_optimizer.zero_grad()
            critics_loss.backward()
            critics_optimizer.step()
            loss = F.softplus(-rivals.critic(drawn)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append((loss.item(), critics_loss.item(), len(real)))
    rows = [np.average(np.array(epoch)[:, :2], 0, np.array(epoch)[:, 2]) for epoch in losses]
    history = example["history"].history
    same(np.transpose([history["loss"], history["critics_loss"]]), rows, 1e-3)
    with torch.no_grad():
        apart = rivals(torch.from_numpy(example["noise"])).numpy() - example["drawn"]
    # A sum near the kink of a LeakyReLU may be rounded to the other side, which changes a few pixels by 0.01.
    same(np.abs(apart).mean(), 0, 5e-3)


LOOPS: dict[str, Callable[[Example], None]] = {
    "segmentation": segmentation,
    "contrastive": contrastive,
    "kfold": kfold,
    "bert": bert,
    "gan": gan,
}


def compare(script: str, epochs: int) -> None:
    """Run an example for some epochs, and its plain loop; raise if the results differ."""
    without_chance()
    sys.argv = [script, f"--epochs={epochs}"]
    LOOPS[Path(script).stem](runpy.run_path(script, run_name="__main__"))
