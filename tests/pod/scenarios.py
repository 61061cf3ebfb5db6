"""The trainings, evaluations and predictions of a pod's hosts: `python host.py "import pod.scenarios"`, in its folder.

The results of each scenario must be equal bit for bit on all pods with this number of cores, and on a single host. Host
n saves its results in `results<n>.pt`.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import tpufit
from tpufit.data import CachedDataset, PerHost
from tpufit.data.augment import CutMix, MixUp

SCENARIOS = []


def scenario(function):
    SCENARIOS.append(function)
    return function


torch.manual_seed(1)
X, Y, W = torch.randn(75, 6), torch.randint(0, 3, (75,)), torch.rand(75)


def compiled(**options):
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    model = tpufit.Model(net)
    model.compile("adamw", "cross_entropy", metrics=["accuracy"], **options)
    return model


def result(model, history):
    return history.history, model.state_dict()


class Rows(Dataset):
    """Records the rows that were read."""

    def __init__(self, rows=75):
        self.rows, self.read = rows, []

    def __len__(self):
        return self.rows

    def __getitem__(self, i):
        self.read.append(i)
        return X[i], Y[i]


@scenario
def arrays():
    model = compiled()
    history = model.fit(X, Y, sample_weight=W, batch_size=4, epochs=2, validation_data=(X[:13], Y[:13]), verbose=0)
    return result(model, history)


@scenario
def a_batch_that_some_hosts_have_no_rows_of():
    model = compiled()
    size = 2
    rows = 2 * size * tpufit.runtime.get_settled_cores().count + 2  # two whole batches, and two rows
    return result(model, model.fit(X[:rows], Y[:rows], batch_size=size, epochs=2, verbose=0))


@scenario
def images_mixed_with_those_of_other_hosts():
    found = []
    torch.manual_seed(4)
    for mix in (MixUp(3), CutMix(3)):
        for rows in (2, 11):  # of the last batch, in which some hosts have fewer rows or none
            whole = 8 * tpufit.runtime.get_settled_cores().count
            images, classes = torch.rand(whole + rows, 3, 4, 4) + 1, torch.randint(0, 3, (whole + rows,))
            model = tpufit.Model(nn.Sequential(nn.Flatten(), nn.Linear(48, 3)))
            model.compile("adamw", "cross_entropy", metrics=["accuracy"])
            history = model.fit(images, classes, batch_size=4, epochs=2, verbose=0, device_transform=mix)
            found.append(result(model, history))
    return found


@scenario
def steps_in_one_graph():
    model = compiled(steps_per_execution=3)
    return result(model, model.fit(X, Y, batch_size=2, epochs=2, verbose=0))


@scenario
def a_dataset_of_which_each_host_reads_its_own_rows():
    data, model = Rows(), compiled()
    history = model.fit(data, batch_size=4, epochs=1, verbose=0)
    reads.append(sorted(set(data.read)))
    return result(model, history)


@scenario
def a_loader_with_workers():
    torch.manual_seed(3)
    model = compiled()
    return result(model, model.fit(DataLoader(Rows(), 2, shuffle=True, num_workers=1), epochs=2, verbose=0))


@scenario
def a_list_of_batches():
    model = compiled()
    return result(model, model.fit([(X[i : i + 3], Y[i : i + 3]) for i in range(0, 75, 3)], epochs=1, verbose=0))


@scenario
def a_stream():
    class Stream(IterableDataset):
        def __iter__(self):
            return zip(X, Y, strict=True)

    model = compiled()
    return result(model, model.fit(Stream(), batch_size=3, epochs=1, verbose=0))


@scenario
def a_cached_dataset():
    data = CachedDataset(Rows(), f"cache{tpufit.process_index()}", workers=0)
    model = compiled()
    return result(model, model.fit(data, batch_size=4, epochs=2, verbose=0))


@scenario
def batches_of_each_hosts_own():
    # A global batch has the cores' rows in order. Each host passes the rows of its own cores.
    model, cores = compiled(), tpufit.runtime.get_settled_cores().count
    shards = tpufit.runtime.make_placement(tpufit.runtime.get_settled_cores()).local_shards
    batches = [(X[i : i + 2], Y[i : i + 2]) for i in range(0, 4 * cores, 2)]
    own = [batch for i, batch in enumerate(batches) if i % cores in shards]
    return result(model, model.fit(PerHost(own), epochs=2, verbose=0))


@scenario
def many_options():
    model = compiled(accumulate_steps=2, use_ema=True, precision="bf16")
    how = {"validation_data": (X[:13], Y[:13]), "validation_step_freq": 2, "class_weight": {0: 1.0, 1: 2.0, 2: 1.0}}
    return result(model, model.fit(X, Y, batch_size=2, epochs=2, steps_per_epoch=4, verbose=0, **how))


@scenario
def a_learning_rate():
    model = compiled()
    curve = model.lr_find(X, Y, batch_size=4, steps=8)
    return curve.losses, curve.suggestion, model.state_dict()


@scenario
def evaluation():
    model = compiled()
    median = tpufit.DatasetMetric(lambda predictions, targets: (predictions.amax(1) + targets).median())
    model.compile("sgd", "cross_entropy", metrics=["accuracy", "auroc", median])  # which keep all rows
    return model.evaluate(X[:29], Y[:29], sample_weight=W[:29], batch_size=4, verbose=0, return_dict=True)


@scenario
def predictions():
    model = compiled(steps_per_execution=2)
    rows = model.predict(X[:29], batch_size=4, verbose=0)
    whole.append(rows is None)
    own.append(model.predict(X[:29], batch_size=4, verbose=0, local=True))
    return torch.zeros(0) if rows is None else rows


@scenario
def single_batches():
    model = compiled()
    logs = [dict(model.train_on_batch(X[:n], Y[:n], return_dict=True)) for n in (8, 8, 5)]
    logs.append(dict(model.test_on_batch(X[:9], Y[:9], return_dict=True)))
    return logs, model.predict_on_batch(X[:9]), model.state_dict()


reads, whole, own = [], [], []
tpufit.init()
results = {function.__name__: function() for function in SCENARIOS}
shards = tpufit.runtime.make_placement(tpufit.runtime.get_settled_cores()).local_shards
torch.save(
    {"results": results, "reads": reads, "whole": whole, "own": own, "shards": shards},
    f"results{tpufit.process_index()}.pt",
)
