"""Track a training with MLflow, offline: what it takes is a callback of two hooks.

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
from tpufit.callbacks import Callback, LearningRateScheduler

parser = argparse.ArgumentParser()
parser.add_argument("--cores", default="8", help="auto, or a count")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--run-dir", type=Path, default=Path("runs/mlflow"))
args = parser.parse_args()


class MLflowLogger(Callback):
    """Logs the parameters and each epoch's logs to one run of MLflow."""

    reads_weights = False

    def __init__(self, uri, experiment, **params):
        self.client = MlflowClient(uri)
        known = self.client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self.client.create_experiment(experiment)
        self.run = self.client.create_run(number).info.run_id
        self.client.log_batch(self.run, params=[Param(name, str(value)) for name, value in params.items()])

    def on_epoch_end(self, epoch, logs=None):
        now = get_current_time_millis()
        self.client.log_batch(self.run, [Metric(name, value, now, epoch) for name, value in logs.items()])

    def on_train_end(self, logs=None):
        self.client.set_terminated(self.run)


tpufit.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
model = tpufit.Model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
model.compile(optimizer="adamw", loss="cross_entropy", metrics=["accuracy"])

args.run_dir.mkdir(parents=True, exist_ok=True)
logger = MLflowLogger(f"sqlite:///{args.run_dir}/mlflow.db", "digits", width=64, optimizer="adamw", batch_size=8)
history = model.fit(
    (images / 16).astype("float32"),
    labels,
    batch_size=8,
    epochs=args.epochs,
    validation_split=0.2,
    cores=args.cores,
    # Its epoch logs have a learning_rate, which the callback after it finds there.
    callbacks=[LearningRateScheduler(lambda epoch, lr: lr * 0.9), logger],
)

tracked = logger.client.get_metric_history(logger.run, "val_accuracy")
assert [point.value for point in tracked] == history.history["val_accuracy"]
finished = logger.client.get_run(logger.run)
print(f"MLflow run {logger.run}: {finished.info.status}, with {finished.data.params}")
for point in sorted(tracked, key=lambda point: point.step):
    print(f"epoch {point.step}: val_accuracy {point.value:.4f}")
