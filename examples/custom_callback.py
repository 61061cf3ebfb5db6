"""Write your own callback: stop as soon as the validation accuracy is good enough, and report the slowest epoch.

python examples/custom_callback.py
"""

import time

from sklearn.datasets import load_digits
from torch import nn

import tpufit
from tpufit.callbacks import Callback


class StopWhenGoodEnough(Callback):
    """Ends training after the epoch in which the validation accuracy reaches a goal.

    Args:
        goal: The accuracy to reach, from 0 to 1.
    """

    def __init__(self, goal):
        self.goal = goal
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self.begun = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        # A batch's logs are still on the device. Reading a log waits for the device, so read them rarely.
        if batch == 0:
            print(f"first batch: loss {logs['loss']:.3f}")

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self.begun)
        if logs["val_accuracy"] >= self.goal:  # an epoch's logs are plain floats
            print(f"reached {logs['val_accuracy']:.1%} after {epoch + 1} epochs")
            self.model.stop_training = True

    def on_train_end(self, logs=None):
        print(f"slowest epoch: {max(self.seconds):.1f} s")


tpufit.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
model = tpufit.Model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
model.compile(optimizer="adamw", loss="cross_entropy", metrics=["accuracy"])
model.fit(
    (images / 16).astype("float32"),
    labels,
    batch_size=8,
    epochs=30,
    validation_split=0.2,
    cores=8,
    callbacks=StopWhenGoodEnough(goal=0.9),
)
