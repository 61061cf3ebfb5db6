"""After the first steps nothing is compiled any more, with any other activity between steps."""

import numpy as np
import pytest
import torch
from torch import nn

import tpufit
from tpufit import runtime
from tpufit.callbacks import Callback, LearningRateScheduler, TerminateOnNaN

pytestmark = pytest.mark.cores(1, 8, timeout=300, quick=False)

X = np.random.default_rng(0).normal(size=(80, 4)).astype("float32")
Y = np.arange(80) % 3


class Compiled(Callback):
    """Records the number of graphs of each role when a step ends, and reads its logs, which waits for it."""

    def __init__(self):
        self.begun = runtime.counts()
        self.graphs = []

    def on_train_batch_end(self, batch, logs=None):
        float(logs["loss"])
        self.graphs.append((runtime.counts() - self.begun).graphs)


def test_50_steps_compile_no_more_than_the_first(cores):
    torch.manual_seed(0)
    model = tpufit.Model(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3)))
    model.compile("adam", "cross_entropy", metrics=["accuracy"], use_ema=True)
    compiled = Compiled()
    callbacks = [compiled, LearningRateScheduler(lambda epoch, rate: rate * 0.9), TerminateOnNaN()]
    model.fit(X, Y, 8 // cores, 5, verbose=0, cores=cores, validation_data=(X, Y), callbacks=callbacks)
    assert len(compiled.graphs) == 50
    train = [graphs["train"] for graphs in compiled.graphs]
    assert train[1] == train[-1] <= 1
    after_first_epoch = compiled.graphs[10]
    assert all(graphs == after_first_epoch for graphs in compiled.graphs[10:])
    before = runtime.counts()
    model.fit(X, Y, 8 // cores, 1, verbose=0, validation_data=(X, Y))
    model.evaluate(X, Y, 8 // cores, verbose=0)
    assert not {"train", "eval"} & set((runtime.counts() - before).graphs)
