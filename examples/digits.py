"""Train a small convolutional network on scikit-learn's handwritten digits, on 8 cores.

    python examples/digits.py [--bf16] [--cores 8] [--epochs 15] [--run-dir runs/digits]

Without a TPU, the cores are virtual cores of the CPU. Afterwards the run directory has two pictures, history.png and
confusion.png. To see more: tensorboard --logdir runs/digits
"""

import argparse
from pathlib import Path

from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn, tensor
from torchmetrics.functional import confusion_matrix

import tpufit
from tpufit.callbacks import EarlyStopping, ModelCheckpoint, TensorBoard

parser = argparse.ArgumentParser()
parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
parser.add_argument("--cores", default="8", help="auto, or a count")
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--run-dir", type=Path, default=Path("runs/digits"))
args = parser.parse_args()

tpufit.set_random_seed(0)
images, labels = load_digits(return_X_y=True)  # 1,797 images of 8 x 8, values 0 to 16
images = (images / 16).astype("float32").reshape(-1, 1, 8, 8)
x, x_test, y, y_test = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)

net = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Dropout(0.25),
    nn.Flatten(),
    nn.Linear(64 * 4 * 4, 10),
)
model = tpufit.Model(net)
model.compile(
    optimizer="adamw",
    loss="cross_entropy",
    metrics=["accuracy"],
    precision="bf16" if args.bf16 else "fp32",
)
model.summary(input_size=(64, 1, 8, 8))
history = model.fit(
    x,
    y,
    batch_size=8,
    epochs=args.epochs,
    validation_split=0.1,
    cores=args.cores,
    callbacks=[
        TensorBoard(args.run_dir / "logs", histogram_freq=5, write_steps_per_second=True),
        ModelCheckpoint(args.run_dir / "best.safetensors", monitor="val_accuracy", save_best_only=True),
        EarlyStopping(monitor="val_loss", patience=5, restore_best_weights=True),
    ],
)
loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"held-out digits: loss {loss:.4f}, accuracy {accuracy:.2%}")
predicted = model.predict(x_test, verbose=0).argmax(1)
print(f"predicted {predicted[:5]}, labeled {y_test[:5]}")

history.plot().savefig(args.run_dir / "history.png")
matrix = confusion_matrix(tensor(predicted), tensor(y_test), task="multiclass", num_classes=10)
tpufit.diagnostics.plots.confusion_matrix(matrix).savefig(args.run_dir / "confusion.png")
