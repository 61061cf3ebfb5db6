"""Search a learning rate and a weight decay with Optuna, which stops bad trials early.

    pip install optuna
    python examples/optuna_sweep.py [--cores 8] [--trials 12] [--epochs 8]

All trials train one architecture in one process, so that only the first one compiles: rates, decays and seeds are
inputs of the compiled step.
"""

import argparse

import optuna
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import AdamW

import tpufit
from tpufit.callbacks import Callback

parser = argparse.ArgumentParser()
parser.add_argument("--cores", default="8", help="auto, or a count")
parser.add_argument("--trials", type=int, default=12)
parser.add_argument("--epochs", type=int, default=8)
args = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")


class Pruning(Callback):
    """Reports each epoch to the trial, and ends the trial if Optuna decides so."""

    reads_weights = False

    def __init__(self, trial):
        self.trial = trial
        self.pruned = False

    def on_epoch_end(self, epoch, logs=None):
        self.trial.report(logs["val_accuracy"], epoch)
        if self.trial.should_prune():
            self.pruned = self.model.stop_training = True


def objective(trial):
    rate = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    decay = trial.suggest_float("weight_decay", 1e-4, 1e-1, log=True)
    tpufit.set_random_seed(trial.number)
    model = tpufit.Model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    model.compile(
        lambda parameters: AdamW(parameters, rate, weight_decay=decay),
        "cross_entropy",
        metrics=["accuracy"],
        scale_lr=None,
    )
    pruning = Pruning(trial)
    data = {"batch_size": 8, "validation_split": 0.2, "cores": args.cores}
    history = model.fit(images, labels, epochs=args.epochs, verbose=0, callbacks=[pruning], **data)
    compiled = len(model.report().counts.compiled)
    print(f"trial {trial.number}: {len(history.epoch)} epochs, {compiled} programs compiled", flush=True)
    if pruning.pruned:
        raise optuna.TrialPruned
    return history.history["val_accuracy"][-1]


optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(
    direction="maximize",
    sampler=optuna.samplers.TPESampler(seed=0),
    pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1),
)
study.optimize(objective, n_trials=args.trials)
states = [trial.state.name for trial in study.trials]
print(f"{states.count('PRUNED')} of {len(states)} trials were pruned")
print(f"best: {study.best_value:.2%} with {study.best_params}")
