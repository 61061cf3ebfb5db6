"""A tabular competition: five folds, out-of-fold predictions, and the mean of five nets as submission.csv.

    python examples/kfold.py [--cores 2] [--epochs 30]

The table is scikit-learn's on breast cancer: 30 numbers of a tumour, and whether it is benign. A fifth of it is the
test set, whose labels a competition doesn't publish.
"""

import argparse
import csv

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import StratifiedKFold, train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn

import tpufit
from tpufit.callbacks import EarlyStopping

parser = argparse.ArgumentParser()
parser.add_argument("--cores", default="auto", help="auto, or a count")
parser.add_argument("--epochs", type=int, default=30)
args = parser.parse_args()

table = load_breast_cancer()
numbers = np.arange(len(table.target))  # a row's name in the submission
x, x_test, y, answers, _, ids = train_test_split(
    table.data.astype("float32"), table.target.astype("float32"), numbers, test_size=0.2, random_state=0
)


def network():
    """Return a net from 30 numbers to one logit."""
    return nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))


def probability(model, rows):
    """Return the probability of class 1 for each row."""
    return 1 / (1 + np.exp(-model.predict(rows, verbose=0)))


out_of_fold = np.zeros(len(x))
submission = np.zeros(len(x_test))
folds = list(StratifiedKFold(5, shuffle=True, random_state=0).split(x, y))
for fold, (train, held_out) in enumerate(folds):
    scaler = StandardScaler().fit(x[train])  # of these rows only: the held-out rows must not leak into it
    valid = scaler.transform(x[held_out])
    tpufit.set_random_seed(fold)
    model = tpufit.Model(network())
    model.compile(
        lambda parameters: torch.optim.AdamW(parameters, 2e-3),
        "binary_cross_entropy_with_logits",
        metrics=["accuracy"],
        scale_lr=None,
    )
    history = model.fit(
        scaler.transform(x[train]),
        y[train],
        batch_size=32,
        epochs=args.epochs,
        validation_data=(valid, y[held_out]),
        callbacks=[EarlyStopping(monitor="val_loss", patience=5, restore_best_weights=True)],
        verbose=0,
        cores=args.cores,
    )
    out_of_fold[held_out] = probability(model, valid)
    submission += probability(model, scaler.transform(x_test)) / len(folds)
    best = min(history.history["val_loss"])
    print(f"fold {fold}: val_loss {best:.4f}, the best of {len(history.epoch)} epochs")

print(f"out of fold: log loss {log_loss(y, out_of_fold):.4f}, AUROC {roc_auc_score(y, out_of_fold):.4f}")
with open("submission.csv", "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["id", "target"])
    writer.writerows((number, f"{value:.6f}") for number, value in zip(ids, submission, strict=True))
print(f"submission.csv: {len(ids)} rows, AUROC {roc_auc_score(answers, submission):.4f} on the unpublished labels")
