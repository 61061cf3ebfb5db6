"""Track a training with MLflow, offline: one callback.

    pip install mlflow-skinny sqlalchemy alembic
    python examples/mlflow_tracking.py [--cores 8] [--epochs 5] [--run-dir runs/mlflow]

Runs are stored in an SQLite database, without a server. Afterwards, with the complete MLflow:
mlflow ui --backend-store-uri sqlite:///runs/mlflow/mlflow.db
Use WandbLogger, TrackioLogger and CometLogger in the same way.
"""

import argparse
from pathlib import Path

from mlflow import MlflowClient
from sklearn.datasets import load_digits
from torch import nn

import tpufit
from tpufit.callbacks import LearningRateScheduler, MLflowLogger

parser = argparse.ArgumentParser()
parser.add_argument("--cores", default="8", help="auto, or a count")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--run-dir", type=Path, default=Path("runs/mlflow"))
args = parser.parse_args()

tpufit.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
model = tpufit.Model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
model.compile(optimizer="adamw", loss="cross_entropy", metrics=["accuracy"])

args.run_dir.mkdir(parents=True, exist_ok=True)
base = f"sqlite:///{args.run_dir}/mlflow.db"
logger = MLflowLogger("digits", config={"width": 64, "batch_size": 8}, tracking_uri=base)
history = model.fit(
    (images / 16).astype("float32"),
    labels,
    batch_size=8,
    epochs=args.epochs,
    validation_split=0.2,
    cores=args.cores,
    callbacks=[LearningRateScheduler(lambda epoch, lr: lr * 0.9), logger],
)

client = MlflowClient(base)
tracked = client.get_metric_history(logger.run_id, "val_accuracy")
assert [point.value for point in tracked] == history.history["val_accuracy"]
finished = client.get_run(logger.run_id)
print(f"MLflow run {logger.run_id}: {finished.info.status}, with {finished.data.params}")
for point in sorted(tracked, key=lambda point: point.step):
    print(f"after {point.step} steps: val_accuracy {point.value:.4f}")
