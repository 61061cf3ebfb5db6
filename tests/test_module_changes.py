"""Changes of the module that a callback makes once, in the middle of a training, and that a resumed training needs."""

import json

import pytest
import torch
from torch import nn

import tpufit
from tpufit.callbacks import Callback, Freeze, ModelCheckpoint

pytestmark = [pytest.mark.cores(1, 8, timeout=600)]

X = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)
STEPS, EPOCHS = 3, 4  # steps of an epoch

OPTIONS = {
    "momentum": {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)},
    "averages": {"optimizer": "adamw", "use_ema": True, "accumulate_steps": 2},
    "on the host": {"optimizer": "adam", "run_eagerly": True},
}


class At(Callback):
    """Calls a function with the module at the beginning of one epoch, or from this epoch on."""

    def __init__(self, epoch, change, again=False):
        self._epoch, self._change, self._again = epoch, change, again

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self._epoch or (self._again and epoch > self._epoch):
            self._change(self.model.module)


def frozen():
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    net[0].requires_grad_(False)
    return net


def learning():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def train(cores, make, callbacks=(), folder=None, options=OPTIONS["momentum"], **fit):
    tpufit.set_random_seed(3)
    model = tpufit.Model(make())
    model.compile(loss="mse", scale_lr=None, **options)
    savers = [] if folder is None else [ModelCheckpoint(folder, save_freq=fit.pop("save_freq", "epoch"))]
    place = {} if options.get("run_eagerly") else {"cores": cores}
    rows = 16 // place.get("cores", 1)
    model.fit(X, Y, rows, epochs=EPOCHS, verbose=0, callbacks=[*callbacks, *savers], **{**place, **fit})
    return model


def interrupt_and_resume(cores, make, callbacks, folder, steps, options=OPTIONS["momentum"], later=None):
    """Train for some steps, and then the rest with a new model; `later` makes the callbacks of the second `fit`."""
    train(cores, make, callbacks(), folder, options, max_steps=steps)
    return train(cores, make, (later or callbacks)(), folder, options, resume=True)


def read_changes(folder):
    newest = max(folder.glob("step-*"))
    return json.loads((newest / "state.json").read_text())["changes"]


def assert_equal(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def unfreeze(module):
    module[0].requires_grad_(True)


def freeze(module):
    module[0].requires_grad_(False)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("make", "change", "options", "epochs"),
    [
        (frozen, unfreeze, "momentum", 2),
        (frozen, unfreeze, "averages", 3),
        (frozen, unfreeze, "on the host", 2.5),
        (learning, freeze, "averages", 2.5),
    ],
)
def test_requires_grad_is_saved(cores, tmp_path, make, change, options, epochs):
    options = OPTIONS[options]
    steps = int(epochs * STEPS) // options.get("accumulate_steps", 1)
    uninterrupted = train(cores, make, [At(1, change)], options=options)
    resumed = interrupt_and_resume(cores, make, lambda: [At(1, change)], tmp_path, steps, options)
    assert_equal(uninterrupted, resumed)
    assert resumed.module[0].weight.requires_grad is (change is unfreeze)
    learns = change is unfreeze
    assert read_changes(tmp_path) == {"requires_grad": {"0.weight": learns, "0.bias": learns}, "layers": {}}


def test_requires_grad_that_training_didnt_change_is_the_scripts(cores, tmp_path):
    bias = float(train(cores, frozen, folder=tmp_path, max_steps=STEPS).state_dict()["2.bias"])
    assert read_changes(tmp_path) == {"requires_grad": {}, "layers": {}}

    def without_bias():
        net = frozen()
        net[2].bias.requires_grad_(False)
        return net

    resumed = train(cores, without_bias, folder=tmp_path, resume=True)
    assert [p.requires_grad for p in resumed.module.parameters()] == [False, False, True, False]
    assert float(resumed.state_dict()["2.bias"]) == bias


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("until", [2, None])
def test_freeze_is_resumed_and_can_be_removed(cores, tmp_path, until):
    def make():
        return [Freeze("0", until=until)]

    first = STEPS + 1
    uninterrupted = train(cores, learning, make())
    assert_equal(uninterrupted, interrupt_and_resume(cores, learning, make, tmp_path / "a", first))
    assert read_changes(tmp_path / "a") == {"requires_grad": {}, "layers": {}}
    before = train(cores, learning, make(), max_steps=first).state_dict()["0.weight"]
    without = interrupt_and_resume(cores, learning, make, tmp_path / "b", first, later=list)
    assert not torch.equal(before, without.state_dict()["0.weight"])


def replace_layer(module):
    module[1] = nn.ReLU()


def add_layer(module):
    module.append(nn.Tanh())


def double(module, args, output):
    return output * 2


def add_hook(module):
    if not module[1]._forward_hooks:
        module[1].register_forward_hook(double)


CHANGES = {
    replace_layer: r"1 \(ReLU then, Tanh now\)",
    add_layer: r"3 \(Tanh then, none now\)",
    add_hook: r"1 \(1 hook then, 0 now\)",
}


@pytest.mark.parametrize(
    ("change", "steps"), [(replace_layer, 2 * STEPS), (add_layer, 2 * STEPS + 1), (add_hook, 2 * STEPS)]
)
def test_layers_and_hooks_that_a_resumed_training_lacks_are_told(cores, tmp_path, change, steps):
    with pytest.warns(
        UserWarning, match=f"before step {steps} training had changed .*: {CHANGES[change]}. Make"
    ) as seen:
        interrupt_and_resume(cores, learning, lambda: [At(1, change)], tmp_path, steps)
    assert sum("training had changed" in str(one.message) for one in seen) == 1
    assert seen[0].filename == __file__


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("change", [replace_layer, add_hook])
def test_a_change_from_its_epoch_on_is_made_again(cores, tmp_path, change):
    def make():
        return [At(1, change, again=True)]

    uninterrupted = train(cores, learning, make())
    assert_equal(uninterrupted, interrupt_and_resume(cores, learning, make, tmp_path, 2 * STEPS + 1))


class Lazy(nn.Module):
    """Its first step makes a layer, a hook, and the weights of a lazy layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.LazyLinear(16)
        self.last = nn.Linear(16, 1)
        self.between = None

    def forward(self, x):
        if self.between is None:
            self.between = nn.Tanh()
            self.between.register_forward_hook(double)
        return self.last(self.between(self.first(x)))


class Watches(Callback):
    """Has a hook during each epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self._handle = self.model.module.last.register_forward_hook(lambda module, args, output: None)

    def on_epoch_end(self, epoch, logs=None):
        self._handle.remove()


@pytest.mark.filterwarnings("error")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_what_each_training_does_again_isnt_told(cores, tmp_path):
    def make():
        net = Lazy()
        net.first(X)
        nn.utils.parametrizations.weight_norm(net.last)
        return net

    uninterrupted = train(cores, make, [Watches()])
    assert_equal(uninterrupted, interrupt_and_resume(cores, make, lambda: [Watches()], tmp_path, 2 * STEPS + 1))
