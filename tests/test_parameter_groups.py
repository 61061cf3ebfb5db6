"""Weight decay for some parameters, rates by depth, and parameters that learn later, as in plain PyTorch."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import tpufit
from tpufit import runtime
from tpufit.callbacks import Callback, Freeze, LRScheduler
from tpufit.errors import ArgumentError, CallbackError, LabelError

pytestmark = [pytest.mark.cores(1, 8), pytest.mark.soak_on(8)]

X = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")  # four batches of 16
Y = (X.sum(1) > 0).astype("int64")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)])
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.tanh())


ADAMW = partial(optim.AdamW, lr=0.01, weight_decay=0.5)


def made(optimizer=ADAMW, **options):
    model = tpufit.Model(Net())
    model.compile(optimizer, "cross_entropy", **({"scale_lr": None, "jit_compile": True} | options))
    return model


def fit(model, cores, epochs=2, **options):
    before = runtime.counts()
    model.fit(X, Y, 16 // cores, epochs, verbose=0, shuffle=False, cores=cores, **options)
    return runtime.counts() - before


def on_the_host(make, epochs=2, every=1, before_epoch=lambda net, epoch: None, net=None):
    net = net or Net()
    optimizer = make(net)
    for epoch in range(epochs):
        before_epoch(net, epoch)
        for first in range(0, 64, 16 * every):
            optimizer.zero_grad()
            rows = slice(first, first + 16 * every)
            F.cross_entropy(net(torch.from_numpy(X[rows])), torch.from_numpy(Y[rows])).backward()
            optimizer.step()
    return net.state_dict()


def assert_close(model, expected):
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-5, msg=name)


def grouped(net, excluded):
    named = dict(net.named_parameters())
    return [
        {"params": [p for name, p in named.items() if not excluded(name, p)]},
        {"params": [p for name, p in named.items() if excluded(name, p)], "weight_decay": 0},
    ]


@pytest.mark.parametrize(
    ("given", "excluded"),
    [
        (True, lambda name, p: p.dim() < 2),
        (["*.bias", "embed.*"], lambda name, p: name.endswith("bias") or name.startswith("embed")),
    ],
    ids=["vectors", "patterns"],
)
def test_weight_decay_of_some_parameters_only(cores, given, excluded):
    model = made(exclude_from_weight_decay=given)
    counts = fit(model, cores)
    assert_close(model, on_the_host(lambda net: ADAMW(grouped(net, excluded))))
    assert [group["weight_decay"] for group in model.optimizer.param_groups] == [0.5, 0]
    assert counts.graphs["train"] <= 2 and not counts.captures and model.learning_rate == 0.01


def test_rates_by_depth(cores):
    model = made(layer_decay=0.5, exclude_from_weight_decay=True, scale_lr="linear")
    names = {id(p): name for name, p in model.module.named_parameters()}
    groups = model.optimizer.param_groups
    found = {names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    depths = {"embed": 0, "blocks.0": 1, "blocks.1": 2, "head": 3}
    for name, (rate, decay) in found.items():
        (depth,) = (depth for prefix, depth in depths.items() if name.startswith(prefix))
        assert rate == pytest.approx(0.01 * 0.5 ** (3 - depth)), name
        assert decay == (0 if name.endswith("bias") or ".1.weight" in name else 0.5), name
    assert len(found) == len(names) and model.learning_rate == 0.01

    class Noted(Callback):
        reads_weights = False
        rates = ()

        def on_train_step_begin(self, batch, logs=None):
            self.rates = [group["lr"] for group in self.model.optimizer.param_groups]

    noted = Noted()
    assert not fit(model, cores, callbacks=[LRScheduler("linear"), noted]).captures
    assert noted.rates == pytest.approx([group["initial_lr"] / 8 for group in groups])  # the last of eight steps
    assert [group["initial_lr"] for group in groups][::2] == pytest.approx([0.01 * cores * 0.5**i for i in range(4)])


def test_a_saved_model_has_its_groups(cores, tmp_path):
    model = made("adamw", exclude_from_weight_decay=True, layer_decay=0.9)
    fit(model, cores)
    model.save(tmp_path / "saved")
    again = tpufit.load(tmp_path / "saved", Net())
    sizes = [[len(group["params"]) for group in one.optimizer.param_groups] for one in (model, again)]
    assert sizes[0] == sizes[1]
    fit(model, cores)
    fit(again, cores)
    assert all(map(np.array_equal, model.get_weights(), again.get_weights()))


def test_an_optimizer_of_some_parameters_is_replayed(cores):
    """Plain PyTorch doesn't clear the gradients of the others either."""
    model = tpufit.Model(Net())
    model.compile(ADAMW(model.module.head.parameters()), "cross_entropy", scale_lr=None, jit_compile=True)
    fit(model, cores)
    assert_close(model, on_the_host(lambda net: ADAMW(net.head.parameters())))


@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}], ids=["each", "accumulated"])
def test_layers_learn_later_by_a_callback(cores, options):
    model = made(**options)
    counts = fit(model, cores, epochs=3, callbacks=[Freeze(["embed", "blocks.*"], until=1)])

    def before_epoch(net, epoch):
        for part in (net.embed, net.blocks):
            part.requires_grad_(epoch >= 1)

    every = options.get("accumulate_steps", 1)
    assert_close(model, on_the_host(lambda net: ADAMW(net.parameters()), 3, every, before_epoch))
    assert counts.captures == {"requires_grad of embed.weight": 1}
    assert all(p.requires_grad for p in model.module.parameters())


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.usefixtures("compiles_anew")
def test_layers_are_frozen_between_fits(cores, name):
    model = made({"sgd": partial(optim.SGD, lr=0.1, momentum=0.9), "adamw": ADAMW}[name])
    fit(model, cores, 1)
    net = model.module
    # After a freeze, Adam counts the steps of the frozen parameters separately. The first time, this is a new graph.
    for frozen, compiles in ((True, True), (False, name == "adamw"), (True, False), (False, False)):
        net.embed.requires_grad_(not frozen)
        before = model.state_dict()["embed.weight"]
        counts = fit(model, cores, 1)
        assert bool(counts.graphs.get("train")) == compiles
        assert torch.equal(model.state_dict()["embed.weight"], before) == frozen


@pytest.mark.parametrize("options", [{"accumulate_steps": 2}, {"use_ema": True}], ids=["accumulated", "ema"])
def test_layers_that_never_learned_start_to_learn(cores, options):
    """From then on their gradients are summed, and their averages kept."""
    model = tpufit.Model(Net())
    model.module.embed.requires_grad_(False)
    model.compile(partial(optim.SGD, lr=0.1), "cross_entropy", scale_lr=None, **options)
    fit(model, cores, 1)
    first = model.state_dict()
    model.module.embed.requires_grad_(True)
    fit(model, cores, 1)
    assert not torch.equal(first["embed.weight"], model.state_dict()["embed.weight"])
    if "accumulate_steps" in options:
        net = Net()
        net.load_state_dict(first)
        assert_close(model, on_the_host(lambda net: optim.SGD(net.parameters(), 0.1), 1, 2, net=net))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude_from_weight_decay": "*.scale"}, r"names '\*.scale', but Net has no such parameter; it has embed"),
        ({"exclude_from_weight_decay": 3}, "None, True or patterns of parameter names"),
        ({"exclude_from_weight_decay": True, "optimizer": "rprop"}, "Rprop has no weight decay"),
        ({"layer_decay": 0}, "a factor above 0 and up to 1, got 0"),
        ({"layer_decay": 1.5}, "a factor above 0 and up to 1, got 1.5"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ArgumentError, match=message):
        made(**options)


def test_groups_without_blocks_or_already_built():
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    with pytest.raises(ArgumentError, match="layer_decay looks for blocks that Sequential repeats"):
        tpufit.Model(net).compile("adamw", "cross_entropy", layer_decay=0.5)
    with pytest.raises(ArgumentError, match="this one has groups already: pass a function"):
        tpufit.Model(net).compile(optim.AdamW(net.parameters()), "cross_entropy", exclude_from_weight_decay=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Freeze(3), "layers must be patterns of names"),
        (lambda: Freeze("a", until=0), "until must be a whole number of at least 1, got 0"),
        (lambda: Freeze("a", since=-1), "since must be a whole number of at least 0"),
    ],
)
def test_wrong_arguments_of_freeze(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


def test_freeze_lists_the_existing_names(cores):
    with pytest.raises(CallbackError, match="Net has no parameter of 'encoder'; it has embed.weight"):
        fit(made(), cores, callbacks=[Freeze("encoder")])


@pytest.mark.parametrize("replace", [False, True], ids=["appended", "replaced"])
def test_a_layer_added_after_compile_isnt_in_the_optimizer(cores, replace):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 2))
    model = tpufit.Model(net)
    model.compile(ADAMW, "cross_entropy", metrics=["accuracy"])
    fit(model, cores)
    if replace:
        net[0] = nn.Linear(6, 5)
    else:
        net.append(nn.Linear(2, 5))
    labels = Y * 4  # of five classes, instead of two
    assert model.predict(X, verbose=0).shape == (64, 5) and len(model.evaluate(X, labels, verbose=0)) == 2
    last = net[-1]
    for method in (model.fit, model.train_on_batch, model.lr_find):
        with pytest.raises(
            ArgumentError, match="weight, .*bias were added to the module after compile, and no optimizer has"
        ):
            method(X, labels)
    if not replace:  # otherwise nothing would learn
        last.requires_grad_(False)
        model.fit(X, labels, verbose=0)
        last.requires_grad_(True)
    before = last.weight.detach().cpu()
    model.optimizer.add_param_group({"params": last.parameters()})
    model.fit(X, labels, verbose=0, epochs=2)
    assert not any(model.report().traced.values()) and not torch.equal(last.weight.cpu(), before)
    with pytest.raises(LabelError, match="label 8 is outside the module's 5 classes"):
        model.fit(X, Y * 8, verbose=0)
    del net[1:]
    model.fit(X, Y, verbose=0)  # further parameters in the optimizer do no harm
