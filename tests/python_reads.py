"""Values that the Python of a step may read. Each case reads a value in a step, and changes it between two steps.

`tests/test_python_reads.py` changes each value between epochs and inside an epoch, and compares the result with a
training that traces every step. To add a case, write a function with `@case` that returns two functions: the first gets
the module and its output and ends the forward pass, and the second changes the value that the first reads.
"""

import contextvars
import dataclasses
import functools
import itertools
import os
import tempfile
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

Read = Callable[[nn.Module, torch.Tensor], torch.Tensor]
Change = Callable[[nn.Module, float], object]
Make = Callable[[], tuple[Read, Change]]

CASES: dict[str, Make] = {}
AT_ONCE: set[str] = set()  # the cases that `tpufit.utils.python_state` covers


def case(make: Make) -> Make:
    """Add a case under its function's name."""
    CASES[make.__name__.replace("_", " ")] = make
    return make


def seen_at_once(make: Make) -> Make:
    """Add a case whose change the next step sees, in whichever hook a callback makes it."""
    AT_ONCE.add(make.__name__.replace("_", " "))
    return case(make)


def table() -> str:
    """The table of `docs/pages/guides/speed.md`."""
    rows = {
        "detected by the next step": [name for name in CASES if name in AT_ONCE],
        "detected by an audit, and `fit` warns": [name for name in CASES if name not in AT_ONCE],
    }
    lines = [f"| {seen} | {', '.join(names)} |" for seen, names in rows.items()]
    return "\n".join(
        ["| changed between two steps of an epoch | what the step's Python reads |", "| --- | --- |", *lines]
    )


class Net(nn.Module):
    """A small net whose output a case's `read` changes. Cases may use `other`, `scale` and `act`."""

    shared = 1.0

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.other = parametrize.register_parametrization(nn.Linear(3, 3), "weight", Scaled())
        self.read, self.scale, self.act = read, 1.0, torch.tanh

    def forward(self, x):
        return self.read(self, self.head(self.body(x)))


# Containers and objects


@seen_at_once
def a_number_of_the_module():
    return lambda net, h: h * net.scale, lambda net, value: setattr(net, "scale", value)


@seen_at_once
def a_long_list_of_the_module():
    def change(net, value):
        net.scales[250] = value

    def read(net, h):
        net.scales = getattr(net, "scales", [1.0] * 300)
        return h * net.scales[250]

    return read, change


@case
def a_long_list_of_a_closure():
    scales = [1.0] * 300
    return lambda net, h: h * scales[250], lambda net, value: scales.__setitem__(250, value)


@case
def a_nested_dict_of_a_closure():
    config = {"model": {"head": {"scales": [{"last": 1.0}]}}}

    def change(net, value):
        config["model"]["head"]["scales"][0]["last"] = value

    return lambda net, h: h * config["model"]["head"]["scales"][0]["last"], change


GLOBALS = {"scale": 1.0, "other": [1, 2]}


@case
def a_global_dict():
    GLOBALS["scale"] = 1.0
    return lambda net, h: h * GLOBALS["scale"], lambda net, value: GLOBALS.update(scale=value)


SCALE = 1.0


@seen_at_once
def a_global_number():
    global SCALE
    SCALE = 1.0

    def change(net, value):
        global SCALE
        SCALE = value

    return lambda net, h: h * SCALE, change


@dataclasses.dataclass
class Config:
    scale: float = 1.0
    inner: Any = None


@case
def a_dataclass_in_a_dataclass():
    config = Config(inner=Config(inner=Config(inner=Config())))

    def change(net, value):
        config.inner.inner.inner.scale = value

    return lambda net, h: h * config.inner.inner.inner.scale, change


class Slots:
    __slots__ = ("scale",)


@case
def an_object_with_slots():
    slots = Slots()
    slots.scale = 1.0
    return lambda net, h: h * slots.scale, lambda net, value: setattr(slots, "scale", value)


@case
def a_deque():
    last = deque([1.0], maxlen=3)
    return lambda net, h: h * last[-1], lambda net, value: last.append(value)


@case
def a_set():
    flags = set()
    return lambda net, h: h * (3.0 if "double" in flags else 1.0), lambda net, value: flags.add("double")


@seen_at_once
def a_class_variable():
    Net.shared = 1.0
    return lambda net, h: h * type(net).shared, lambda net, value: setattr(Net, "shared", value)


# Functions


@seen_at_once
def a_function_kept_as_an_attribute():
    return lambda net, h: net.act(h), lambda net, value: setattr(net, "act", F.gelu)


def scaled(h, scale=1.0, *, factor=1.0):
    return h * scale * factor


@case
def a_default_argument():
    scaled.__defaults__ = (1.0,)
    return lambda net, h: scaled(h), lambda net, value: setattr(scaled, "__defaults__", (value,))


@case
def a_keyword_only_default():
    scaled.__defaults__, scaled.__kwdefaults__ = (1.0,), {"factor": 1.0}
    return lambda net, h: scaled(h), lambda net, value: setattr(scaled, "__kwdefaults__", {"factor": value})


@case
def a_partial_function():
    applied = functools.partial(scaled, scale=1.0)
    return lambda net, h: applied(h), lambda net, value: applied.keywords.update(scale=value)


@case
def a_cached_function():
    source = [1.0]

    @functools.cache
    def scale():
        return source[0]

    def change(net, value):
        source[0] = value
        scale.cache_clear()

    return lambda net, h: h * scale(), change


class WithProperty:
    def __init__(self):
        self.sources = [[1.0]]

    @property
    def scale(self):
        return self.sources[0][-1]


@case
def a_property():
    holder = WithProperty()
    return lambda net, h: h * holder.scale, lambda net, value: holder.sources[0].append(value)


@case
def a_replaced_method():
    class Head(nn.Module):
        def forward(self, h):
            return h

    head = Head()

    def change(net, value):
        Head.forward = lambda self, h: h * value

    return lambda net, h: head(h), change


@case
def a_generator():
    scales = [1.0]

    def endless():
        while True:
            yield scales[-1]

    values = endless()
    return lambda net, h: h * next(values), lambda net, value: scales.append(value)


@case
def an_iterator_that_is_replaced():
    def change(net, value):
        net.values = itertools.repeat(value)

    def read(net, h):
        net.values = getattr(net, "values", itertools.repeat(1.0))
        return h * next(net.values)

    return read, change


# The process


@case
def a_context_variable():
    scale = contextvars.ContextVar("scale", default=1.0)
    return lambda net, h: h * scale.get(), lambda net, value: scale.set(value)


@case
def an_environment_variable():
    os.environ.pop("TPUFIT_TEST_SCALE", None)

    def change(net, value):
        os.environ["TPUFIT_TEST_SCALE"] = str(value)

    return lambda net, h: h * float(os.environ.get("TPUFIT_TEST_SCALE", "1")), change


@case
def a_cache():
    """A cache that the first step without it builds; this may be the audited step."""

    def read(net, h):
        if net.__dict__.get("cache") is None:
            net.__dict__["cache"] = torch.full([], net.__dict__.get("cached", 1.0), device=h.device)
        return h * net.__dict__["cache"]

    def change(net, value):
        net.__dict__.update(cached=value, cache=None)

    return read, change


@case
def a_file():
    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        file.write("1.0")

    def read(net, h):
        with open(file.name) as text:
            return h * float(text.read())

    def change(net, value):
        with open(file.name, "w") as text:
            text.write(str(value))

    return read, change


@case
def a_clock():
    now = [0.0]  # a clock that the test sets, because a step can't take an hour

    return lambda net, h: h * (3.0 if now[0] > 3600 else 1.0), lambda net, value: now.__setitem__(0, 7200.0)


# torch


@seen_at_once
def a_forward_hook():
    def change(net, value):
        net.body.register_forward_hook(lambda module, args, output: output * value)

    return lambda net, h: h, change


@seen_at_once
def a_forward_pre_hook():
    def change(net, value):
        net.head.register_forward_pre_hook(lambda module, args: (args[0] * value,))

    return lambda net, h: h, change


@seen_at_once
def a_backward_hook():
    def change(net, value):
        net.head.register_full_backward_hook(lambda module, inputs, outputs: tuple(g * value for g in inputs))

    return lambda net, h: h, change


@case
def a_tensor_hook():
    return lambda net, h: h, lambda net, value: net.body.weight.register_hook(lambda gradient: gradient * value)


@case
def a_post_accumulate_grad_hook():
    def change(net, value):
        def scale(parameter):
            parameter.grad = parameter.grad * value

        net.body.weight.register_post_accumulate_grad_hook(scale)

    return lambda net, h: h, change


@case
def a_hook_for_all_modules():
    handles = []

    def change(net, value):
        def double(module, args, output):
            return output * value if isinstance(module, nn.Linear) else None

        handles.append(nn.modules.module.register_module_forward_hook(double))
        net._the_test_ends = lambda: [handle.remove() for handle in handles]

    return lambda net, h: h, change


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = [1.0] * 300

    def forward(self, weight):
        return weight * self.scales[250]


@seen_at_once
def a_number_of_a_parametrization():
    def change(net, value):
        net.other.parametrizations.weight[0].scales[250] = value

    def read(net, h):
        return net.other(h)

    return read, change


@case
def a_dropout_rate():
    rates = [[0.1]]
    return lambda net, h: F.dropout(h, rates[0][0], net.training), lambda net, value: rates[0].__setitem__(0, 0.5)


@case
def the_default_dtype():
    def change(net, value):
        torch.set_default_dtype(torch.float16)
        net._the_test_ends = lambda: torch.set_default_dtype(torch.float32)

    # One third has different bits in each dtype.
    return lambda net, h: h * torch.tensor([1 / 3] * 3).float().to(h.device), change


@case
def whether_autocast_is_on():
    on = [[False]]

    def read(net, h):
        with torch.autocast(h.device.type, torch.bfloat16, enabled=on[0][0]):
            return F.linear(h, net.head.weight[:, :3]).float()

    return read, lambda net, value: on[0].__setitem__(0, True)


@case
def a_seed_inside_the_step():
    seeds = [[1]]

    def read(net, h):
        torch.manual_seed(seeds[0][0])
        return F.dropout(h, 0.5, net.training)

    return read, lambda net, value: seeds[0].__setitem__(0, 2)


@case
def whether_gradients_are_on():
    on = [[True]]

    def read(net, h):
        with torch.set_grad_enabled(on[0][0]):
            extra = net.body.bias.sum()
        return h * (1 + extra)

    return read, lambda net, value: on[0].__setitem__(0, False)


@case
def a_flag_of_torch():
    torch.use_deterministic_algorithms(False)

    def change(net, value):
        torch.use_deterministic_algorithms(True, warn_only=True)
        net._the_test_ends = lambda: torch.use_deterministic_algorithms(False)

    return lambda net, h: h * (3.0 if torch.are_deterministic_algorithms_enabled() else 1.0), change


# Tensors on the host


@case
def a_small_tensor_on_the_host():
    scale = [torch.ones(3)]
    return lambda net, h: h * scale[0].to(h.device), lambda net, value: scale[0].fill_(value)


@case
def a_large_tensor_on_the_host():
    scale = [torch.ones(400)]
    return lambda net, h: h * scale[0].to(h.device)[397:], lambda net, value: scale[0].fill_(value)


@case
def a_numpy_view_of_a_tensor_on_the_host():
    array = np.ones(400, np.float32)
    scale = [torch.from_numpy(array)]
    return lambda net, h: h * scale[0].to(h.device)[397:], lambda net, value: array.fill(value)


@seen_at_once
def an_array():
    array = np.ones(400, np.float32)
    return lambda net, h: h * float(array[399]), lambda net, value: array.fill(value)


class Tagged(torch.Tensor):
    pass


@case
def an_instance_of_a_tensor_subclass():
    scale = [torch.ones(3).as_subclass(Tagged)]

    def change(net, value):
        scale[0] = (torch.ones(3) * value).as_subclass(Tagged)

    return lambda net, h: (h * scale[0].to(h.device)).as_subclass(torch.Tensor), change


@case
def an_attribute_of_a_tensor():
    tensor = torch.ones(3)
    tensor.scale = 1.0
    return lambda net, h: h * tensor.scale, lambda net, value: setattr(tensor, "scale", value)


if __name__ == "__main__":
    print(table())
