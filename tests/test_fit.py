"""Training, evaluation and prediction, on 1 and on 8 cores, with scikit-learn's digits."""

import copy
import threading
import weakref

import numpy as np
import pytest
import torch
import torchmetrics
from call_costs import spent
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tpufit
from tpufit.callbacks import (
    Callback,
    CSVLogger,
    EarlyStopping,
    ModelCheckpoint,
    ReduceLROnPlateau,
    TensorBoard,
    TerminateOnNaN,
)
from tpufit.errors import ArgumentError, CallbackError, DataError, LabelError, NotCompiledError, PlacementError
from tpufit.runtime.driver import driver

pytestmark = pytest.mark.cores(1, 8, timeout=600, quick=True)

IMAGES, LABELS = load_digits(return_X_y=True)  # 1,797 rows, which no usual batch size divides
IMAGES = (IMAGES / 16).astype("float32")


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def compiled(net=None, **arguments):
    model = tpufit.Model(net or mlp())
    given = {"optimizer": "adamw", "loss": "cross_entropy", "metrics": ["accuracy"], "scale_lr": None}
    model.compile(**(given | arguments))
    return model


def fit(model, cores, x=IMAGES, y=LABELS, rows=256, **arguments):
    given = {"batch_size": rows // cores, "verbose": 0, "cores": cores}
    return model.fit(x, y, **(given | arguments))


def waits(counts):
    """Return the waits, except for back-pressure and captures."""
    return {reason: n for reason, n in counts.waits.items() if n and reason not in ("throttle", "capture", "audit")}


def on_host(model):
    module = copy.deepcopy(mlp())
    module.load_state_dict(model.state_dict())
    return module.eval()


def test_training_learns_and_history_holds_floats(cores):
    history = fit(compiled(optimizer=lambda p: torch.optim.AdamW(p, 3e-3)), cores, epochs=8, validation_split=0.2)
    assert set(history.history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert all(type(value) is float for values in history.history.values() for value in values)
    assert history.epoch == list(range(8))
    assert history.history["val_accuracy"][-1] > 0.8 > 0.5 > history.history["accuracy"][0]


@pytest.mark.runtime("torch_xla")
def test_rows_are_split_over_the_cores(cores):
    class Look(tpufit.Model):
        def train_step(self, batch):
            import torch_xla

            specs.append(torch_xla._XLAC._get_xla_sharding_spec(batch[0]))
            return super().train_step(batch)

    specs = []
    model = Look(mlp())
    model.compile("sgd", "cross_entropy")
    fit(model, cores)
    assert specs and all(("devices=[8,1]" in spec) == (cores == 8) for spec in specs)


@pytest.mark.usefixtures("compiles_anew")
def test_an_uneven_epoch_compiles_two_graphs_and_the_next_none(cores):
    model = compiled(metrics=["accuracy", torchmetrics.F1Score(task="multiclass", num_classes=10, average="macro")])
    data = (IMAGES[:600], LABELS[:600])
    _, first = spent(lambda: fit(model, cores, validation_data=data))
    assert first.graphs == {"train": 2, "eval": 2}
    _, second = spent(lambda: fit(model, cores, validation_data=data))
    assert second.graphs == {}
    _, third = spent(lambda: model.evaluate(*data, batch_size=256 // cores, verbose=0))
    assert third.graphs == {}


def test_a_new_learning_rate_every_step_compiles_nothing(cores):
    class Decay(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.optimizer.param_groups[0]["lr"] *= 0.9

    model = compiled()
    fit(model, cores)
    _, counts = spent(lambda: fit(model, cores, callbacks=Decay()))
    assert counts.graphs == {}
    assert model.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.9**8)


def test_progress_and_loggers_compile_nothing(cores, tmp_path):
    model = compiled()
    fit(model, cores)
    loggers = [TensorBoard(tmp_path, update_freq=1), CSVLogger(tmp_path / "log.csv")]
    _, counts = spent(lambda: fit(model, cores, verbose=1, callbacks=loggers))
    assert counts.graphs == {} and not counts.fallbacks


def test_an_epoch_waits_once_and_a_validation_once(cores):
    _, counts = spent(lambda: fit(compiled(), cores, epochs=3, validation_data=(IMAGES, LABELS), validation_freq=2))
    assert waits(counts) == {"logs": 4}
    assert counts.host_reads == 0 and not counts.fallbacks


def test_only_reading_a_batchs_logs_waits(cores):
    class Reader(Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert set(logs) == {"loss", "accuracy"} and len(logs) == 2
            if batch == 2:
                values.append((logs["loss"], logs["accuracy"], logs["loss"]))
            kept.append(logs)

    values, kept = [], []
    history, counts = spent(lambda: fit(compiled(), cores, callbacks=[Reader()]))
    assert waits(counts) == {"logs": 1, "batch logs": 1}
    assert kept[-1]["loss"] == history.history["loss"][-1]
    assert kept[2]["loss"] == values[0][0] != kept[3]["loss"]  # a batch's logs keep its values


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-3),
        # At ten times these rates, rounding alone moves a unit of a ReLU across zero.
        pytest.param(lambda p: torch.optim.Adam(p, 1e-3), marks=pytest.mark.soak_on(8)),
        lambda p: torch.optim.AdamW(p, 1e-3),
        pytest.param(lambda p: torch.optim.RMSprop(p, 1e-3), marks=pytest.mark.soak_on(8)),
        pytest.param(lambda p: torch.optim.Adagrad(p, 1e-2), marks=pytest.mark.soak_on(8)),
        pytest.param(lambda p: torch.optim.NAdam(p, 1e-3), marks=pytest.mark.soak_on(8)),
        pytest.param(lambda p: torch.optim.Adadelta(p, 0.5), marks=pytest.mark.soak_on(8)),
    ],
    ids=["sgd", "adam", "adamw", "rmsprop", "adagrad", "nadam", "adadelta"],
)
@pytest.mark.usefixtures("compiles_anew")
def test_twenty_steps_equal_plain_pytorch(cores, optimizer):
    ours, theirs = mlp(), mlp()
    x, y = torch.from_numpy(IMAGES[:1280]), torch.from_numpy(LABELS[:1280])
    model = compiled(ours, optimizer=optimizer)
    history, counts = spent(lambda: fit(model, cores, x, y, rows=64, shuffle=False))
    assert counts.host_reads == 0 and sum(counts.graphs.values()) == 1
    plain, losses = optimizer(theirs.parameters()), []
    for i in range(20):
        loss = F.cross_entropy(theirs(x[i * 64 : (i + 1) * 64]), y[i * 64 : (i + 1) * 64])
        plain.zero_grad()
        loss.backward()
        plain.step()
        losses.append(loss.item())
    assert history.history["loss"][0] == pytest.approx(sum(losses) / 20, abs=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name], rtol=0, atol=1e-5)


def test_evaluate_equals_plain_pytorch_and_torchmetrics(cores):
    model = compiled()
    fit(model, cores)
    loss, accuracy = model.evaluate(IMAGES, LABELS, batch_size=256 // cores, verbose=0)
    with torch.no_grad():
        logits = on_host(model)(torch.from_numpy(IMAGES))
    labels = torch.from_numpy(LABELS)
    assert loss == pytest.approx(F.cross_entropy(logits, labels).item(), abs=1e-6)
    expected = torchmetrics.functional.accuracy(logits, labels, task="multiclass", num_classes=10)
    assert accuracy == pytest.approx(float(expected), abs=1e-6)


def test_evaluate_counts_every_row_once(cores):
    class Rows(tpufit.Model):
        def test_step(self, batch):
            x, _, _ = tpufit.data.unpack(batch)
            return {"mean": x.float().mean()}

    for rows in (1, 7, 8, 13, 257):
        model = Rows(mlp())
        model.compile("sgd", "mse")
        values = np.random.default_rng(0).normal(size=(rows, 1)).astype("float32")
        mean = model.evaluate(values, values, batch_size=4, verbose=0, cores=cores)
        assert mean == pytest.approx(values.mean(), abs=1e-6)


def test_evaluate_returns_what_keras_returns(cores):
    model = compiled()
    assert list(model.evaluate(IMAGES, LABELS, verbose=0, return_dict=True, cores=cores)) == ["loss", "accuracy"]
    assert isinstance(model.evaluate(IMAGES, LABELS, verbose=0), list)
    model = compiled(metrics=None)
    assert isinstance(model.evaluate(IMAGES, LABELS, verbose=0, steps=1), float)


def test_fit_twice_then_evaluate_then_predict(cores):
    model = compiled()
    first = fit(model, cores, epochs=2).history["loss"]
    second = fit(model, cores, epochs=2).history["loss"]
    assert second[0] < first[-1] < first[0]
    loss, accuracy = model.evaluate(IMAGES, LABELS, verbose=0)
    assert loss < second[-1] and 0 < accuracy < 1
    outputs = model.predict(IMAGES, batch_size=256 // cores, verbose=0)
    with torch.no_grad():
        expected = on_host(model)(torch.from_numpy(IMAGES)).numpy()
    assert outputs.shape == (1797, 10) and outputs.dtype == np.float32
    np.testing.assert_allclose(outputs, expected, atol=1e-5)  # all rows, in order


def test_predict_returns_nests_and_ignores_targets(cores):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 3)

        def forward(self, x):
            return {"logits": self.layer(x), "both": (x[:, 0], x.sum(1).bfloat16())}

    outputs = tpufit.Model(Two()).predict(
        DataLoader(TensorDataset(*map(torch.from_numpy, (IMAGES, LABELS))), 100), cores=cores, verbose=0
    )
    assert outputs["logits"].shape == (1797, 3)
    np.testing.assert_array_equal(outputs["both"][0], IMAGES[:, 0])
    assert outputs["both"][1].dtype == np.float32 and outputs["both"][1].shape == (1797,)


@pytest.mark.usefixtures("compiles_anew")
def test_a_custom_step_and_two_optimizers(cores):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = nn.Linear(64, 8), nn.Linear(8, 64)

        def forward(self, x):
            return self.decode(self.encode(x))

    class Autoencoder(tpufit.Model):
        def train_step(self, batch):
            (x,) = batch
            loss = self.compute_loss(x, x, self(x))
            self.apply_gradients(loss)
            again = F.mse_loss(self(x), x)
            self.apply_gradients(again, optimizer=self.second)
            return {"loss": loss, "again": again}

    torch.manual_seed(0)
    net = Pair()
    model = Autoencoder(net)
    model.compile(lambda p: torch.optim.SGD(net.encode.parameters(), 0.1), "mse", scale_lr=None)
    model.second = torch.optim.Adam(net.decode.parameters(), 1e-2)
    history, counts = spent(lambda: fit(model, cores, y=None, epochs=3))
    assert set(history.history) == {"loss", "again"}
    assert history.history["loss"][-1] < 0.7 * history.history["loss"][0]
    assert all(again < loss for loss, again in zip(history.history["loss"], history.history["again"], strict=True))
    assert counts.graphs == {"train": 2}


@pytest.mark.soak_on(8)
def test_optimizer_instance_ties_and_references_survive_the_move(cores):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 16), nn.Linear(16, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    torch.manual_seed(0)
    net = Tied()
    mine = net.embed.weight
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    net(torch.arange(10)).sum()  # a forward pass first, as in a notebook
    model = compiled(net, optimizer=optimizer)
    tokens = np.arange(640) % 10
    history = fit(model, cores, tokens, tokens, epochs=5)
    assert model.optimizer is optimizer and net.embed.weight is net.head.weight is mine
    assert history.history["accuracy"][-1] == 1.0
    assert optimizer.param_groups[0]["capturable"] is False  # the user's settings are restored
    state = model.state_dict()
    assert torch.equal(state["embed.weight"], state["head.weight"])
    assert model.to_cpu() is net and mine.device.type == "cpu" and net.head.weight is mine
    for _ in range(2):  # the module and its optimizer continue in plain PyTorch
        optimizer.zero_grad()
        F.cross_entropy(net(torch.arange(10)), torch.arange(10)).backward()
        optimizer.step()
    assert fit(model, cores, tokens, tokens).history["accuracy"] == [1.0]


def test_parameters_that_only_share_memory_are_refused(cores):
    net = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
    net[1].weight = nn.Parameter(net[0].weight.data.t())
    with pytest.raises(PlacementError, match=r"0\.weight and 1\.weight are two parameters over the same memory"):
        fit(compiled(net), cores)


class Halves(nn.Module):
    def __init__(self, left, right):
        super().__init__()
        self.left, self.right = nn.Parameter(left), nn.Parameter(right)

    def forward(self, x):
        return F.linear(x, self.left) + F.linear(x, self.right).tanh()


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_parameters_that_are_parts_of_one_tensor_train_as_separate_ones(cores, dim):
    parts = torch.randn(10 * (2 - dim), 64 * (1 + dim), generator=torch.Generator().manual_seed(0)).chunk(2, dim)
    apart = [part.clone() for part in parts]
    one, other = (compiled(Halves(*weights)) for weights in (parts, apart))
    assert fit(one, cores).history == fit(other, cores).history
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def test_an_older_output_doesnt_prevent_the_move(cores):
    net = mlp()
    shown = net(torch.from_numpy(IMAGES[:5])).sum()  # as a notebook keeps the result of every cell
    reference = weakref.ref(net[0].weight)
    before = net[0].weight.detach().clone()
    fit(compiled(net), cores)
    assert reference() is net[0].weight and net[0].weight.device.type == driver().device_type
    shown.backward()  # the old graph still has its old values
    assert net[0].weight.grad is None
    assert not torch.equal(before, net[0].weight.detach().cpu())


def test_the_model_is_called_with_host_and_with_device_data(cores):
    model = compiled()
    before = model(IMAGES[:5])
    fit(model, cores)
    after = model(IMAGES[:5])
    assert before.device.type == after.device.type == "cpu" and not torch.equal(before, after)
    np.testing.assert_allclose(after.numpy(), model.predict(IMAGES[:5], verbose=0), atol=1e-6)
    on_device = model(next(model.module.parameters()).detach().new_ones(5, 64))
    assert on_device.device.type == driver().device_type


def test_weights_can_be_saved_and_loaded(cores, tmp_path):
    model, other = compiled(), compiled(mlp(seed=1))
    fit(model, cores)
    model.save_weights(tmp_path / "w.safetensors")
    other.load_weights(tmp_path / "w.safetensors")  # on the host
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    fit(other, cores)
    other.load_weights(tmp_path / "w.safetensors")  # on the device
    assert other.evaluate(IMAGES, LABELS, verbose=0) == model.evaluate(IMAGES, LABELS, verbose=0)


def test_bf16_computes_in_bfloat16_and_keeps_float32(cores):
    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            y = self.net(x)
            seen.add(y.dtype)
            return y

    seen = set()
    model = compiled(Spy(), precision="bf16", optimizer=lambda p: torch.optim.AdamW(p, 3e-3))
    history = fit(model, cores, epochs=6)
    assert seen == {torch.bfloat16}
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32}
    assert history.history["accuracy"][-1] > 0.75
    assert model.predict(IMAGES, verbose=0).dtype == np.float32


def test_batch_norm_sees_the_global_batch(cores):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    plain = copy.deepcopy(net)
    model = compiled(net, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    fit(model, cores, IMAGES[:261], LABELS[:261], rows=512)  # one uneven batch
    plain(torch.from_numpy(IMAGES[:261]))
    state = model.state_dict()
    torch.testing.assert_close(state["1.running_mean"], plain[1].running_mean, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state["1.running_var"], plain[1].running_var, atol=1e-5, rtol=1e-5)
    assert state["1.num_batches_tracked"] == 1


def test_dropout_is_a_function_of_seed_and_step(cores):
    class Validate(Callback):  # other code in between must not change it
        def on_train_batch_end(self, batch, logs=None):
            if batch % 3 == 0:
                self.model(IMAGES[:5])
                logs["loss"]

    def losses(seed, callbacks=None):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10))
        torch.manual_seed(100 + seed)
        model = compiled(net)
        return fit(model, cores, epochs=2, validation_data=(IMAGES[:100], LABELS[:100]), callbacks=callbacks).history

    assert losses(0) == losses(0, Validate())
    assert losses(0) != losses(1)


def test_datasets_loaders_and_iterables(cores):
    tensors = TensorDataset(torch.from_numpy(IMAGES), torch.from_numpy(LABELS))
    rows = 256 // cores

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return len(tensors)

        def __getitem__(self, i):
            return tensors[i]

    def loss(x, **arguments):
        torch.manual_seed(1)
        return fit(compiled(), cores, x, None, **({"batch_size": None} | arguments)).history["loss"]

    expected = loss(tensors, batch_size=rows, shuffle=False)
    assert loss(Rows(), batch_size=rows, shuffle=False) == expected
    assert loss(DataLoader(tensors, batch_size=rows)) == expected
    assert loss([tensors[i : i + rows] for i in range(0, 1797, rows)]) == expected
    endless = (tensors[i : i + rows] for _ in iter(int, 1) for i in range(0, 1797, rows))
    steps = -(-1797 // 256) if cores == 1 else None
    if steps:  # on 8 cores a global batch of an endless stream may cross the end of the rows
        assert loss(endless, steps_per_epoch=steps) == expected
    assert loss(Rows(), batch_size=rows) == loss(tensors, batch_size=rows) != expected  # shuffled alike


def test_sample_weights_as_in_a_plain_loop(cores):
    weights = np.random.default_rng(0).random(1797).astype("float32")
    net = mlp()
    expected = F.cross_entropy(net(torch.from_numpy(IMAGES)), torch.from_numpy(LABELS), reduction="none")
    expected = (expected * torch.from_numpy(weights)).mean().item()
    model = compiled(copy.deepcopy(net), metrics=None)
    ours = model.evaluate(IMAGES, LABELS, sample_weight=weights, batch_size=256 // cores, verbose=0, cores=cores)
    assert ours == pytest.approx(expected, abs=1e-6)
    fit(model, cores, sample_weight=weights)


def test_learning_rate_scales_with_the_cores_once(cores, capsys):
    for scale, factor in (("linear", cores), ("sqrt", cores**0.5), (None, 1)):
        model = compiled(optimizer=lambda p: torch.optim.SGD(p, 0.01), scale_lr=scale)
        fit(model, cores, verbose=2)
        fit(model, cores)
        assert model.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * factor)
        if scale == "linear" and cores == 8:
            line = "8 cores (XLA:CPU, virtual) | batch 32 x 8 = 256 | lr 0.01 x 8 = 0.08 (linear) | fp32"
            assert capsys.readouterr().out.splitlines()[0] == line


def test_stop_training_works_in_a_batch_and_after_an_epoch(cores):
    class Stop(Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append(batch)
            self.model.stop_training = batch == 2

    steps = []
    history = fit(compiled(), cores, epochs=5, callbacks=Stop())
    assert steps == [0, 1, 2] and history.epoch == [0]


def test_a_callback_that_raises(cores):
    class Faulty(Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise ValueError("my fault")

    class Witness(Callback):
        def on_train_end(self, logs=None):
            ended.append(True)

    ended = []
    model = compiled()
    with pytest.raises(CallbackError, match=r"Faulty\.on_epoch_end raised ValueError: my fault") as error:
        fit(model, cores, callbacks=[Faulty(), Witness()])
    assert isinstance(error.value.__cause__, ValueError) and ended == [True]
    assert fit(model, cores).history["loss"]  # and fit can be called again


def test_an_error_in_the_data_is_raised_unchanged(cores):
    def batches():
        yield IMAGES[:64], LABELS[:64]
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        fit(compiled(), cores, batches(), None, batch_size=None)


def test_labels_outside_the_classes(cores):
    model = compiled()
    wrong = LABELS.copy()
    wrong[1700] = 10
    with pytest.raises(LabelError, match="label 10 is outside the module's 10 classes"):
        fit(model, cores, y=wrong, shuffle=False)
    assert torch.isfinite(model.state_dict()["0.weight"]).all()
    assert np.isfinite(fit(model, cores).history["loss"][0])
    with pytest.raises(LabelError, match="label -1"):
        model.evaluate(IMAGES[:9], np.full(9, -1), verbose=0)


def test_other_errors_say_what_to_do(cores):
    model = tpufit.Model(mlp())
    for call in (model.fit, model.evaluate):
        with pytest.raises(NotCompiledError, match=r"call model\.compile"):
            call(IMAGES, LABELS, verbose=0)
    model.compile("sgd")
    with pytest.raises(NotCompiledError, match="fit needs a loss"):
        fit(model, cores)
    with pytest.raises(DataError, match="equally many rows"):
        fit(compiled(), cores, y=LABELS[:-1])
    with pytest.raises(DataError, match="empty"):
        fit(compiled(), cores, IMAGES[:0], LABELS[:0])
    with pytest.raises(DataError, match="needs targets"):
        fit(compiled(), cores, y=None)


class OwnTestStep(tpufit.Model):
    def test_step(self, batch):
        x, y = batch
        return {"error": (self(x).argmax(-1) != y).float().mean()}


class OwnTrainStep(tpufit.Model):
    def train_step(self, batch):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.apply_gradients(loss)
        return {"loss": loss}


def test_a_loss_is_needed_only_for_tpufits_own_step(cores):
    evaluating, training = OwnTestStep(mlp()), OwnTrainStep(mlp())
    for model in (evaluating, training):
        model.compile("sgd")
    logs = evaluating.evaluate(IMAGES[:64], LABELS[:64], verbose=0, cores=cores, return_dict=True)
    with torch.no_grad():
        wrong = on_host(evaluating)(torch.from_numpy(IMAGES[:64])).argmax(-1) != torch.from_numpy(LABELS[:64])
    assert logs == {"error": pytest.approx(float(wrong.float().mean()))}
    assert evaluating.test_on_batch(IMAGES[:64], LABELS[:64], return_dict=True) == pytest.approx(logs)
    assert len(fit(training, cores).history["loss"]) == 1
    for method, call in {
        "fit": lambda: fit(evaluating, cores),
        "evaluate": lambda: training.evaluate(IMAGES[:64], LABELS[:64], verbose=0),
        "test_on_batch": lambda: training.test_on_batch(IMAGES[:64], LABELS[:64]),
    }.items():
        with pytest.raises(NotCompiledError, match=f"{method} needs a loss"):
            call()


@pytest.mark.soak_on(8)
def test_evaluating_in_a_hook_keeps_training_mode(cores):
    class Look(Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.evaluate(IMAGES[:40], LABELS[:40], verbose=0)
            self.model.predict(IMAGES[:40], verbose=0)
            modes.append(self.model.module[1].training)

    def run(callbacks):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))
        return fit(compiled(net), cores, callbacks=callbacks).history

    modes = []
    assert run(Look()) == run(None)
    assert set(modes) == {True}


def test_training_modes_after_each_method(cores):
    net = nn.Sequential(nn.Linear(64, 10), nn.Dropout())
    model = compiled(net)
    model.predict(IMAGES[:5], verbose=0, cores=cores)
    assert net.training and net[1].training  # unchanged
    fit(model, cores)
    assert not net.training and not net[1].training  # ready for use


def test_fit_from_another_thread(cores):
    """A notebook's widgets and some servers call it so."""
    results = []
    thread = threading.Thread(target=lambda: results.append(fit(compiled(), cores).history["loss"][0]))
    thread.start()
    thread.join(120)
    assert len(results) == 1 and np.isfinite(results[0])


def test_logs_of_a_test_step_follow_the_metrics(cores):
    class Own(tpufit.Model):
        def test_step(self, batch):
            logs = super().test_step(batch)
            return {"zed": logs["loss"] * 0 + 3, **logs, "abc": logs["loss"] * 0 + 2}

    model = Own(mlp())
    model.compile(loss="cross_entropy", metrics=["accuracy"])
    how = {"batch_size": 256 // cores, "verbose": 0, "cores": cores}
    logs = model.evaluate(IMAGES, LABELS, **how, return_dict=True)
    assert model.evaluate(IMAGES, LABELS, **how) == [logs["loss"], logs["accuracy"], 2.0, 3.0]
    assert model.test_on_batch(IMAGES[:64], LABELS[:64])[2:] == [2.0, 3.0]


def test_without_an_optimizer_all_but_training_works(cores):
    model = tpufit.Model(mlp())
    model.compile(None, "cross_entropy", metrics=["accuracy"])
    with pytest.raises(NotCompiledError, match="there is no optimizer"):
        fit(model, cores)
    plain = compiled()
    how = {"batch_size": 256 // cores, "verbose": 0, "cores": cores}
    assert model.evaluate(IMAGES, LABELS, **how) == plain.evaluate(IMAGES, LABELS, **how)
    assert np.array_equal(model.predict(IMAGES, **how), plain.predict(IMAGES, **how))
    with pytest.raises(NotCompiledError, match="there is no optimizer"):
        model.train_on_batch(IMAGES[:64], LABELS[:64])


@pytest.mark.parametrize(
    ("module", "options"),
    [(nn.Flatten(), {}), (mlp().requires_grad_(False), {"use_ema": True}), (nn.Flatten(), {"run_eagerly": True})],
    ids=["no parameters", "frozen", "eagerly"],
)
@pytest.mark.soak_on(8)
def test_a_module_without_trainable_parameters(cores, module, options):
    module = copy.deepcopy(module)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = tpufit.Model(module)
    model.compile("adamw", "cross_entropy", metrics=["accuracy"], **options)
    with pytest.warns(UserWarning, match="the optimizer has nothing to train: the module has no parameters, or none"):
        history = fit(model, cores, epochs=2, validation_data=(IMAGES, LABELS)).history
    assert history["loss"] == pytest.approx(history["val_loss"], rel=1e-5)
    assert history["loss"][0] == pytest.approx(model.evaluate(IMAGES, LABELS, verbose=0)[0], rel=1e-5)
    assert len(model.predict(IMAGES, verbose=0)) == 1797
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def _returning(value):
    class Returning(tpufit.Model):
        def train_step(self, batch):
            x, y = batch
            loss = self.compute_loss(x, y, self(x))
            self.apply_gradients(loss)
            return loss if value == "loss" else None

    return Returning


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(("value", "got"), [("None", "None"), ("loss", r"a tensor of shape \(\)")])
def test_train_step_must_return_logs(cores, eager, value, got):
    model = _returning(value)(mlp())
    model.compile("sgd", "cross_entropy", run_eagerly=eager)
    with pytest.raises(ArgumentError, match=f'train_step must return a dict of scalars, got {got}.*return {{"loss"'):
        fit(model, cores)


def test_test_step_must_return_logs(cores):
    class Returning(tpufit.Model):
        def test_step(self, batch):
            x, y = batch
            return self.compute_loss(x, y, self(x))

    model = Returning(mlp())
    model.compile("sgd", "cross_entropy")
    with pytest.raises(ArgumentError, match=r"Returning\.test_step must return a dict of scalars, got a tensor"):
        model.evaluate(IMAGES, LABELS, verbose=0, cores=cores)


@pytest.mark.parametrize("eager", [True, False])
def test_train_step_without_an_update_is_reported(cores, eager):
    class Forgetful(tpufit.Model):
        def train_step(self, batch):
            x, y = batch
            return {"loss": self.compute_loss(x, y, self(x))}

    class ByHand(tpufit.Model):
        def train_step(self, batch):
            x, y = batch
            loss = self.compute_loss(x, y, self(x))
            weights = list(self.parameters())
            with torch.no_grad():
                for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                    weight -= 0.1 * gradient
            return {"loss": loss}

    model = Forgetful(mlp())
    model.compile("sgd", "cross_entropy", run_eagerly=eager)
    with pytest.warns(UserWarning, match="calls no optimizer.s step.*self.apply_gradients"):
        fit(model, cores)
    model = ByHand(mlp())
    model.compile("sgd", "cross_entropy", run_eagerly=eager)
    losses = fit(model, cores, epochs=2).history["loss"]
    assert losses[1] < losses[0]


@pytest.mark.filterwarnings("error")
@pytest.mark.soak_on(8)
def test_epochs_without_a_validation_are_allowed(cores, tmp_path):
    best = ModelCheckpoint(tmp_path / "best.safetensors", monitor="val_loss", save_best_only=True)
    watching = [EarlyStopping("val_loss", patience=3), ReduceLROnPlateau("val_loss"), best]
    fit(compiled(), cores, epochs=4, validation_split=0.2, validation_freq=2, callbacks=watching)
    assert (tmp_path / "best.safetensors").exists()
    for missing in ({"validation_freq": 5, "validation_split": 0.2}, {}):
        with pytest.warns(UserWarning, match="EarlyStopping can't find 'val_loss'"):
            fit(compiled(), cores, epochs=2, callbacks=EarlyStopping("val_loss"), **missing)


@pytest.mark.parametrize("name", ["limit", "validation_limit"])
def test_a_limit_of_no_batches_names_its_argument(cores, name):
    with pytest.raises(ArgumentError, match=f"^{name} must be a whole number of batches"):
        fit(compiled(), cores, validation_split=0.2, **{name: 0})


def test_training_that_ends_on_nan_keeps_its_history(cores, tmp_path):
    model = compiled(optimizer=lambda p: torch.optim.SGD(p, 1e30))
    guards = [TerminateOnNaN(), ModelCheckpoint(tmp_path / "run")]
    with pytest.warns(UserWarning, match="the checkpoint of step .* was not written.*has NaN or infinities"):
        history = fit(model, cores, epochs=3, callbacks=guards)
    assert len(history.history["loss"]) == 1
