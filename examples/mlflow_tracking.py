"""Track a training with MLflow, offline: what it takes is a class of three methods.

    pip install mlflow-skinny sqlalchemy alembic
    python examples/mlflow_tracking.py [--cores 8] [--epochs 5] [--run-dir runs/mlflow]

Runs are kept in a data base of SQLite, without any server. Afterwards, with the whole of MLflow:
mlflow ui --backend-store-uri sqlite:///runs/mlflow/mlflow.db
"""

import argparse
from pathlib import Path

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient
from mlflow.utils.time import get_current_time_millis
from sklearn.datasets import load_digits
from torch import nn

import tpufit
from tpufit.callbacks import LearningRateScheduler, Tracker

parser = argparse.ArgumentParser()
parser.add_argument("--cores", default="8", help="auto, or a count")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--run-dir", type=Path, default=Path("runs/mlflow"))
args = parser.parse_args()


class MLflowRun:
    """One run of MLflow's, as a `tpufit.callbacks.Logger`.

    Args:
        uri: Where runs are kept.
        experiment: What the run belongs to; it is made if there is none of that name.
    """

    def __init__(self, uri, experiment):
        self.client = MlflowClient(uri)
        known = self.client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self.client.create_experiment(experiment)
        self.id = self.client.create_run(number).info.run_id

    def log_hyperparameters(self, values):
        self.client.log_batch(self.id, params=[Param(name, str(value)) for name, value in values.items()])

    def log_metrics(self, step, metrics):
        now = get_current_time_millis()
        self.client.log_batch(self.id, [Metric(name, value, now, step) for name, value in metrics.items()])

    def close(self):
        self.client.set_terminated(self.id)


tpufit.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
model = tpufit.Model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
model.compile(optimizer="adamw", loss="cross_entropy", metrics=["accuracy"])

args.run_dir.mkdir(parents=True, exist_ok=True)
run = MLflowRun(f"sqlite:///{args.run_dir}/mlflow.db", "digits")
tracker = Tracker(run, {"width": 64, "optimizer": "adamw", "batch_size": 8}, update_freq=10)
history = model.fit(
    (images / 16).astype("float32"),
    labels,
    batch_size=8,
    epochs=args.epochs,
    validation_split=0.2,
    cores=args.cores,
    # Its epoch logs have a learning_rate, which the tracker after it finds there.
    callbacks=[LearningRateScheduler(lambda epoch, lr: lr * 0.9), tracker],
)

tracked = run.client.get_metric_history(run.id, "val_accuracy")
assert [point.value for point in tracked] == history.history["val_accuracy"]
finished = run.client.get_run(run.id)
print(f"MLflow run {run.id}: {finished.info.status}, with {finished.data.params}")
for point in sorted(tracked, key=lambda point: point.step):
    print(f"step {point.step}: val_accuracy {point.value:.4f}")
