"""`lr_find` gives plain PyTorch's curve on 1 and 8 cores, compiles one graph, and restores everything."""

import math
import random
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, BATCH
from call_costs import spent
from engines import engine_of
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tpufit
from tpufit import runtime
from tpufit.data import stream
from tpufit.errors import ArgumentError, DataError, NotCompiledError
from tpufit.trainer.lr_find import LRCurve

pytestmark = pytest.mark.filterwarnings("ignore:the loss never fell")  # at the few and low rates of some tests
on_cores = pytest.mark.cores(1, 8, timeout=600, quick=False)

IMAGES, LABELS = load_digits(return_X_y=True)  # 1,797 rows: seven whole batches of 256, and a short batch
IMAGES = (IMAGES / 16).astype("float32")
ROWS = 256


class Net(nn.Module):
    """A net with buffers, and with random numbers in its steps."""

    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(64, 32), nn.BatchNorm1d(32)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.body(x)).relu()))


def mlp():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def compiled(net=mlp, model=tpufit.Model, **arguments):
    tpufit.set_random_seed(0)
    made = model(net())
    made.compile(**({"optimizer": sgd, "loss": "cross_entropy", "metrics": ["accuracy"]} | arguments))
    return made


def find(model, cores, x=IMAGES, y=LABELS, **arguments):
    return model.lr_find(x, y, **({"batch_size": ROWS // cores, "steps": 20, "cores": cores} | arguments))


def fit(model, cores, epochs=2, **arguments):
    return model.fit(IMAGES, LABELS, ROWS // cores, epochs, verbose=0, cores=cores, **arguments).history


def everything(model):
    """Return everything that training changes, by name, in comparable values."""
    state = dict(model.state_dict())
    optimizers = [value for value in vars(model).values() if isinstance(value, torch.optim.Optimizer)]
    for i, optimizer in enumerate(optimizers):
        for j, values in enumerate(optimizer.state.values()):
            host = runtime.to_host([torch.as_tensor(value) for value in values.values()], "test")
            state |= {f"{key} {i} {j}": value for key, value in zip(values, host, strict=True)}
    groups = [{k: v for k, v in g.items() if k != "params"} for o in optimizers for g in o.param_groups]
    modes = [module.training for module in model.module.modules()]
    draws = random.random(), np.random.rand(), float(torch.rand(()))
    tpufit.set_random_seed(0)
    return SimpleNamespace(
        state=state, rest=(groups, modes, draws, model.steps_taken, engine_of(model).state.numbers.seed)
    )


def assert_equal(one, other):
    assert one.rest == other.rest
    assert one.state.keys() == other.state.keys()
    for name, value in one.state.items():
        assert torch.equal(value, other.state[name]), name


# The curve


def two_groups(net):
    return torch.optim.SGD([{"params": net[0].parameters(), "lr": 0.5}, {"params": net[2].parameters()}], 0.1)


@on_cores
@pytest.mark.parametrize(
    ("optimizer", "end"),
    [
        (partial(torch.optim.SGD, lr=0.1), 1.0),
        pytest.param(torch.optim.AdamW, 0.01, marks=pytest.mark.soak_on(8)),
        (two_groups, 1.0),
    ],
)
@pytest.mark.parametrize("eagerly", [False, pytest.param(True, marks=pytest.mark.soak_on(8))])
def test_the_curve_equals_plain_pytorchs(cores, optimizer, end, eagerly):
    """The same curve on 1 and 8 cores. With seven whole batches in a pass, the data are repeated."""
    tpufit.set_random_seed(0)
    net = mlp()
    model = tpufit.Model(net)
    made = optimizer(net) if optimizer is two_groups else optimizer
    model.compile(made, "cross_entropy", run_eagerly=eagerly)
    plain = mlp()
    plain.load_state_dict(net.state_dict())
    curve = find(model, cores, steps=30, start_lr=1e-4 * end, end_lr=end)

    plain_optimizer = optimizer(plain if optimizer is two_groups else plain.parameters())
    batches = [
        batch
        for epoch in range(5)
        for batch in stream(IMAGES, LABELS, batch_size=ROWS, shuffle=True, seed=torch.initial_seed()).epoch(epoch)
        if len(batch[0]) == ROWS
    ]
    losses = []
    for i, (x, y) in enumerate(batches[:30]):
        for j, group in enumerate(plain_optimizer.param_groups):
            group["lr"] = end * 1e-4 * 1e4 ** (i / 29) / (5 if j else 1)
        loss = nn.functional.cross_entropy(plain(x), y)
        plain_optimizer.zero_grad()
        loss.backward()
        plain_optimizer.step()
        losses.append(float(loss.detach()))
    assert curve.losses == pytest.approx(losses, abs=1e-4)
    assert curve.lrs == pytest.approx([end * 1e-4 * 1e4 ** (i / 29) for i in range(30)])
    assert losses[-1] < losses[0] - 0.05


@on_cores
@pytest.mark.soak_on(8)
def test_the_suggestion_trains_and_too_large_a_rate_ends_it(cores):
    model = compiled(optimizer="sgd", scale_lr=None)
    curve = find(model, cores, steps=100, end_lr=1e4)
    assert 1e-2 < curve.suggestion < 1
    assert len(curve.lrs) == len(curve.losses) == len(curve.smoothed) < 100
    assert curve.smoothed[-1] > 4 * min(curve.smoothed)
    slow = fit(compiled(optimizer="sgd", scale_lr=None), cores, epochs=6)
    model.learning_rate = curve.suggestion
    assert fit(model, cores, epochs=6)["loss"][-1] < 0.5 * slow["loss"][-1]


@on_cores
@pytest.mark.usefixtures("compiles_anew")
def test_one_graph_for_all_rates_and_a_wait_for_ten_steps(cores):
    model = compiled()
    curve, counts = spent(lambda: find(model, cores, steps=45, end_lr=0.1))
    assert len(curve.losses) == 45
    assert counts.graphs == {"train": 1}
    waits = {reason: n for reason, n in counts.waits.items() if n and reason not in ("throttle", "capture", "audit")}
    assert waits == {"state": 1, "lr_find": 5}
    assert counts.host_reads == 0 and not counts.fallbacks and not counts.captures
    _, again = spent(lambda: model.fit(IMAGES[:1792], LABELS[:1792], ROWS // cores, verbose=0))
    assert not again.graphs and not again.captures


@on_cores
@pytest.mark.parametrize("rows", [600, 100, 5])
@pytest.mark.soak_on(8)
def test_short_data_are_repeated(cores, rows):
    """Of 600 rows, 512 are whole batches; 100 rows are one short batch, which is then the size of all."""
    curve = find(compiled(), cores, IMAGES[:rows], LABELS[:rows], steps=25, end_lr=0.1)
    assert len(curve.losses) == 25
    loader = DataLoader(TensorDataset(torch.tensor(IMAGES[:rows]), torch.tensor(LABELS[:rows])), ROWS // cores)
    assert len(find(compiled(), cores, loader, None, steps=25, end_lr=0.1, batch_size=None).losses) == 25


@on_cores
@pytest.mark.soak_on(8)
def test_sample_weights_count(cores):
    once = find(compiled(), cores, steps=5, end_lr=1e-6)
    doubled = find(compiled(), cores, sample_weight=np.full(len(LABELS), 2.0), steps=5, end_lr=1e-6)
    assert doubled.losses == pytest.approx([2 * loss for loss in once.losses], rel=1e-4)


# What it leaves unchanged


class Signed(torch.optim.Optimizer):
    """Not PyTorch's optimizer: it creates its state in its first step."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 0.1)
                p.sub_(group["lr"] * mean.sign())


@on_cores
@pytest.mark.parametrize(
    "optimizer",
    [
        "adamw",
        *(
            pytest.param(optimizer, marks=pytest.mark.soak)
            for optimizer in (sgd, partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1))
        ),
        pytest.param(Signed, marks=pytest.mark.soak_on(8)),
    ],
)
@pytest.mark.parametrize("earlier", [0, pytest.param(1, marks=pytest.mark.soak_on(8))])
def test_lr_find_restores_everything(cores, optimizer, earlier):
    """On 8 cores the rates grow eightfold at the first fit, before or after `lr_find`."""
    model, twin = compiled(Net, optimizer=optimizer), compiled(Net, optimizer=optimizer)
    for one in (model, twin):
        if earlier:
            fit(one, cores, earlier)
        else:
            one.evaluate(IMAGES, LABELS, cores=cores, verbose=0)
        one.module.body.eval()
        tpufit.set_random_seed(0)
    before = everything(model)
    find(model, cores)
    assert_equal(everything(model), before)
    assert_equal(everything(twin), before)
    assert fit(model, cores, 2) == fit(twin, cores, 2)
    assert_equal(everything(model), everything(twin))


@on_cores
@pytest.mark.soak_on(8)
@pytest.mark.parametrize("name", ["GAN", "Llama", "normalizing flow", "BYOL"])
def test_fit_continues_as_without_lr_find(cores, name):
    """A second optimizer; tables or layers created by the first batch; weights outside of all optimizers."""
    architecture, results = ARCHITECTURES[name], []
    for searched in (False, True):
        tpufit.set_random_seed(0)
        net = architecture.net()
        model = architecture.model(net)
        model.compile(architecture.optimizer(net), architecture.loss)
        if searched:
            model.lr_find(*architecture.data, batch_size=BATCH // cores, steps=12, end_lr=0.01, cores=cores)
        history = model.fit(*architecture.data, batch_size=BATCH // cores, verbose=0, cores=cores).history
        results.append((history, everything(model)))
    (history, left), (history_after, left_after) = results
    assert history == history_after
    assert_equal(left, left_after)


@on_cores
@pytest.mark.soak_on(8)
@pytest.mark.filterwarnings("ignore:the train step is traced again")
@pytest.mark.parametrize("name", ["control flow on the step count", "teacher forcing"])
def test_python_counts_and_random_state_are_restored(cores, name):
    test_fit_continues_as_without_lr_find(cores, name)


@pytest.mark.soak_on(8)
@on_cores
def test_a_loader_shuffles_the_same_after_lr_find(cores):
    def train(searched):
        model = compiled()
        data = TensorDataset(torch.tensor(IMAGES), torch.tensor(LABELS))
        loader = DataLoader(data, ROWS // cores, shuffle=True)
        if searched:
            find(model, cores, loader, None, batch_size=None)
        return model.fit(loader, verbose=0, cores=cores).history

    assert train(False) == train(True)


class Stop(BaseException):
    """Like Ctrl-C, not a subclass of Exception."""


@on_cores
@pytest.mark.parametrize(
    "error",
    [
        ValueError,
        pytest.param(KeyboardInterrupt, marks=pytest.mark.soak_on(8)),
        pytest.param(Stop, marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("where", ["data", pytest.param("step", marks=pytest.mark.soak_on(8))])
def test_everything_is_restored_after_an_error(cores, error, where):
    class Raising(tpufit.Model):
        raises = False

        def train_step(self, batch):
            logs = super().train_step(batch)
            if self.raises:
                raise error("here")
            return logs

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return len(LABELS)

        def __getitem__(self, i):
            reads.append(i)
            if where == "data" and len(reads) > 5 * ROWS:
                raise error("here")
            return IMAGES[i], LABELS[i]

    reads = []
    model, twin = compiled(Net, Raising, optimizer="adamw"), compiled(Net, optimizer="adamw")
    for one in (model, twin):
        fit(one, cores)
        tpufit.set_random_seed(0)
    model.raises = where == "step"
    with pytest.raises(error, match="here"):
        find(model, cores, Rows(), None)
    model.raises = False
    assert_equal(everything(model), everything(twin))
    assert fit(model, cores) == fit(twin, cores)
    assert_equal(everything(model), everything(twin))


@pytest.mark.soak_on(8)
@on_cores
def test_weights_consumed_by_a_failed_step_are_restored(cores, monkeypatch):
    import torch_xla

    def large():  # with its momentum 17 MB, enough that its memory is donated to each step
        return nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 512), nn.Linear(512, 10))

    def fail(graph, inputs):
        calls.append(1)
        results = run(graph, inputs)
        if len(calls) == 5:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return results

    model, run, calls = compiled(large), torch_xla._XLAC._run_cached_graph, []
    fit(model, cores, 1)
    tpufit.set_random_seed(0)
    before = everything(model)
    monkeypatch.setattr(torch_xla._XLAC, "_run_cached_graph", fail)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        find(model, cores)
    assert_equal(everything(model), before)
    assert math.isfinite(fit(model, cores, 1)["loss"][0])


# Losses that don't fall


class Breaking(tpufit.Model):
    """Its loss is NaN at rates above 0.001."""

    def compute_loss(self, x, y, y_pred, sample_weight=None):
        rate = torch.as_tensor(self.optimizer.param_groups[0]["lr"], device=y_pred.device)
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss + 0 * torch.where(rate > 1e-3, -1.0, 1.0).log()


@on_cores
@pytest.mark.soak_on(8)
def test_a_nan_loss_ends_the_curve(cores):
    model = compiled(model=Breaking)
    before = everything(model)
    with pytest.warns(
        UserWarning, match=r"the loss never fell between .* 1e-05 and 0.1 \(15 of 30 steps gave a loss\)"
    ):
        curve = find(model, cores, steps=30, start_lr=1e-5, end_lr=0.1)
    assert len(curve.lrs) == len(curve.losses) == 15 and np.isfinite(curve.losses).all()
    assert curve.lrs[-1] < 1e-3 and curve.suggestion is None
    assert all(torch.equal(v, before.state[k]) for k, v in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:y has NaN")
@on_cores
def test_a_loss_that_is_always_nan(cores):
    with pytest.warns(UserWarning, match="never fell"):
        curve = find(compiled(loss="mse", metrics=None), cores, y=np.full((len(LABELS), 10), np.nan, "float32"))
    assert curve == LRCurve([], [], [], None)


@on_cores
@pytest.mark.soak_on(8)
def test_data_that_cannot_be_repeated_are_an_error(cores):
    model, twin = compiled(), compiled()
    batches = ((IMAGES[:ROWS], LABELS[:ROWS]) for _ in range(3 * cores))
    with pytest.raises(DataError, match="an iterator can be read only once"):
        find(model, cores, batches, None, batch_size=None)
    assert fit(model, cores) == fit(twin, cores)


@on_cores
def test_a_step_without_a_loss_is_an_error(cores):
    class Other(tpufit.Model):
        def train_step(self, batch):
            return {"distance": super().train_step(batch)["loss"]}

    with pytest.raises(ArgumentError, match=r"Other.train_step returns \['distance'\]"):
        find(compiled(model=Other), cores)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"start_lr": 0.0}, "start_lr must be a finite number above 0, got 0.0"),
        ({"start_lr": 1.0, "end_lr": 0.1}, "end_lr=0.1"),
        ({"end_lr": math.inf}, "end_lr must be a finite number above start_lr, got inf"),
        ({"steps": 1}, "steps must be a whole number of at least 2, got 1"),
        ({"stop_factor": 1.0}, "stop_factor must be a number above 1"),
        ({"smoothing": 1.0}, "smoothing must be a share from 0 to below 1"),
    ],
)
def test_wrong_arguments(arguments, says):
    with pytest.raises(ArgumentError, match=says):
        compiled().lr_find(IMAGES, LABELS, **arguments)


def test_lr_find_needs_a_compiled_model():
    with pytest.raises(NotCompiledError, match="lr_find needs a compiled model"):
        tpufit.Model(mlp()).lr_find(IMAGES, LABELS)


# Reading a curve


def rates(count):
    return [10.0 ** (i / 10 - 6) for i in range(count)]


def test_smoothing_is_an_exponential_mean():
    curve = LRCurve.of(rates(3), [3.0, 2.0, 1.0], smoothing=0.5)
    assert curve.smoothed == pytest.approx([3.0, (0.5 * 3 + 2) / 1.5, (0.25 * 3 + 0.5 * 2 + 1) / 1.75])


def test_the_suggestion_is_where_the_loss_falls_fastest():
    losses = [2.3 - 2 / (1 + math.exp((30 - i) / 3)) for i in range(50)] + [10.0] * 3
    for smoothing, tolerance in ((0.0, 0), (0.5, 1), (0.9, 3)):  # also if an average shows it late
        curve = LRCurve.of(rates(53), losses, smoothing)
        assert abs(rates(53).index(curve.suggestion) - 30) <= tolerance


def test_the_ends_of_the_curve_arent_suggested():
    steep_at_the_ends = [4.0, 3.1, 2.3, 2.3, 2.3] + [2.3 - 0.01 * i for i in range(40)] + [8.0, 3.0, 9.0, 1.95]
    curve = LRCurve.of(rates(49), steep_at_the_ends, smoothing=0.0)
    assert rates(49)[4] <= curve.suggestion <= rates(49)[45]


@pytest.mark.parametrize("losses", [[1.0] * 40, [1.0 + 0.1 * i for i in range(40)], [1.0], []])
def test_a_curve_that_never_falls_has_no_suggestion(losses):
    assert LRCurve.of(rates(40), losses, smoothing=0.9).suggestion is None


def test_a_noisy_constant_loss_has_no_suggestion():
    noise = np.random.default_rng(0).normal(2.3, 0.1, (20, 100))
    assert [LRCurve.of(rates(100), losses, smoothing=0.9).suggestion for losses in noise.tolist()] == [None] * 20


def test_a_loss_below_zero_doesnt_end_it():
    losses = [-float(i) for i in range(40)] + [-30.0] * 10
    assert len(LRCurve.of(rates(50), losses, smoothing=0.5, stop_factor=4.0).losses) == 50


def test_a_fall_at_the_very_start_suggests_the_first_rate():
    losses = [5.0, 3.0, 2.0, 1.5, 1.2, 1.1, 4.0, 9.0]
    assert (
        LRCurve.of(rates(8), losses, smoothing=0.9).suggestion == rates(8)[0]
    )  # it lags by more steps than the curve has
    assert LRCurve.of(rates(8), losses, smoothing=0.0).suggestion == rates(8)[0]


def test_the_plot(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    from matplotlib import pyplot

    curve = LRCurve.of(rates(5), [2.0, 1.9, 1.0, 0.8, 5.0], smoothing=0.0)
    axes = curve.plot()
    assert axes.get_xscale() == "log" and len(axes.lines) == 3
    assert list(axes.lines[1].get_ydata()) == curve.smoothed
    assert 0 < axes.get_ylim()[0] < 0.8 and 2 < axes.get_ylim()[1] < 5  # the fall, and not the divergence
    assert curve.plot(axes) is axes
    nothing = LRCurve.of([], [], 0.9).plot(pyplot.figure().subplots())
    assert len(nothing.lines) == 2
    pyplot.close("all")


def test_the_plot_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'tpufit\[plot\]'"):
        LRCurve.of(rates(2), [2.0, 1.0], 0.9).plot()
