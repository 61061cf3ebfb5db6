"""Flash attention: JAX's kernel inside steps, run by Pallas' interpreter, compared with plain attention."""

import copy
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tpufit
from tpufit import runtime
from tpufit.backend import AttentionForms, Sharding
from tpufit.errors import UnknownNameError
from tpufit.metrics import PassMetrics
from tpufit.runtime.ops import attention_choice
from tpufit.runtime.ops.attention_choice import choose_attention, choose_flash
from tpufit.runtime.trace_context import tracing_with

pytest.importorskip("jax")

F32, BF16 = torch.float32, torch.bfloat16
# Rows, heads, heads of keys, queries, keys, width, causal, mask (see `mask_of`) and dtype.
FORMS = {
    "causal": (2, 2, 2, 128, 128, 64, True, None, F32),
    "of several blocks": (1, 1, 1, 640, 640, 64, True, None, F32),
    "all keys, filled up": (2, 2, 2, 100, 150, 80, False, None, F32),
    "causal, filled up, more queries": (2, 2, 2, 150, 100, 96, True, None, F32),
    "grouped, rows that 8 cores can't share": (11, 4, 2, 128, 128, 64, True, None, F32),
    "keys of one head": (2, 4, 1, 128, 128, 64, False, None, F32),
    "width 128, padding": (3, 2, 2, 100, 100, 128, False, "padding", F32),
    "width 256, padding": (2, 2, 1, 128, 128, 256, False, "padding", F32),
    "padding and causal": (3, 2, 2, 100, 100, 64, False, "padding, causal", F32),
    "a window": (1, 2, 1, 640, 640, 64, False, "window", F32),
    "joined texts": (3, 2, 1, 128, 128, 64, False, "texts", F32),
    "bfloat16": (2, 2, 2, 128, 128, 64, True, None, BF16),
    "bfloat16, grouped, padding": (2, 4, 2, 100, 100, 128, False, "padding", BF16),
}


def numbers_of(rows, keys):
    """Return the text id of each key; the last text is padding, longer in each row than in the row before."""
    lengths = torch.tensor([keys - 7 * i for i in range(rows - 1)] + [0])
    texts = torch.arange(keys) // 30 + torch.arange(rows)[:, None]
    return texts.masked_fill(torch.arange(keys) >= lengths[:, None], -1)


def mask_of(name, numbers):
    """Return a mask of text ids. The last row has only padding."""
    places = torch.arange(numbers.shape[-1], device=numbers.device)
    causal, padding = places <= places[:, None], (numbers >= 0)[:, None, None]
    return {
        "padding": lambda: padding,
        "padding, causal": lambda: causal & padding,
        "window": lambda: causal & (places > places[:, None] - 200),
        "texts": lambda: (numbers[:, None, :, None] == numbers[:, None, None]) & causal & padding,
    }[name]()


def attended(query, key, value, upstream, mask, causal):
    """Return the result of attention and its gradients, of a sum weighted by `upstream`."""
    given = [x.detach().requires_grad_() for x in (query, key, value)]
    grouped = query.shape[1] != key.shape[1]
    result = F.scaled_dot_product_attention(*given, mask, is_causal=causal, enable_gqa=grouped)
    return [result, *torch.autograd.grad(result, given, upstream)]


def error_of(found, exact):
    """Return the largest error, relative to the largest number."""
    return (found.double() - exact).abs().max() / exact.abs().max()


def computed_by_kernel(cores, given, compute):
    """Return the results of a step that computes on the cores, with attention by the kernel."""
    place = runtime.make_placement(runtime.start(cores, "test"))
    state = runtime.make_state(place, [])
    program = runtime.make_program(place, "predict", state, PassMetrics([], place), attention=AttentionForms("flash"))

    def body(inputs, seed):
        seed(0)
        return compute(*inputs)

    with tracing_with(interprets_flash=True):
        return runtime.to_host(program("key", place.send(given, Sharding.ROWS), [0], body), "test")


# Cases whose rows, heads or mask are divided differently among cores.
SIMILAR = ("causal", "keys of one head", "width 256, padding", "bfloat16")
ON_CORES = ("of several blocks", "grouped, rows that 8 cores can't share", "bfloat16, grouped, padding")


@pytest.mark.slow
@pytest.mark.cores(1, 8, quick=False)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.soak] if name in SIMILAR else pytest.mark.soak_on(1 if name in ON_CORES else 8)
        )
        for name in FORMS
    ],
)
def test_the_kernel_equals_plain_attention(cores, name):
    rows, heads, shared, queries, keys, width, causal, masked, dtype = FORMS[name]
    torch.manual_seed(0)
    shapes = ((rows, heads, queries, width), *((rows, shared, keys, width),) * 2, (rows, heads, queries, width))
    given = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
    numbers = numbers_of(rows, keys)
    mask = None if masked is None else mask_of(masked, numbers)
    exact = attended(*(x.double() for x in given), mask, causal)
    found = computed_by_kernel(
        cores,
        [*given, numbers],
        lambda *sent: attended(*sent[:4], None if masked is None else mask_of(masked, sent[4]), causal),
    )
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype is dtype
        assert error_of(ours, theirs) < (4e-6 if dtype is F32 else 1e-2)


@pytest.mark.slow
@pytest.mark.cores(1)
def test_second_derivatives_equal_plain_attentions(cores):
    torch.manual_seed(0)
    given = [torch.randn(1, 1, 128, 64) for _ in range(3)]

    def penalty(query, key, value):
        query = query.detach().requires_grad_()
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        (gradient,) = torch.autograd.grad(y.square().sum(), query, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), query)[0]

    with sdpa_kernel(SDPBackend.MATH):  # PyTorch's other kernels have no second derivative
        exact = penalty(*(x.double() for x in given))
    (found,) = computed_by_kernel(cores, given, lambda *sent: [penalty(*sent)])
    assert error_of(found, exact) < 1e-5


WORDS, WIDTH, TIME = 16, 32, 128


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out, self.wide = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.wide(x)


class GPT(nn.Module):
    """Looks up words, and predicts the next word at each position."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(0.1 * torch.randn(TIME, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        x = self.words(x) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(1, 2)


def texts(rows):
    """Each word is the previous word plus one of two numbers, which the row determines."""
    generator = np.random.default_rng(0)
    steps = generator.integers(1, 3, (rows, 1))
    return ((generator.integers(0, WORDS, (rows, 1)) + steps * np.arange(TIME + 1)) % WORDS).astype(np.int64)


def trained(net, cores, rows, attention, epochs=1, batch_size=2, **options):
    """Return the losses and the weights after training a copy of a net, and the model."""
    x, module = texts(rows), copy.deepcopy(net)
    model = tpufit.Model(module)
    rate = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model.compile(rate, "cross_entropy", scale_lr=None, attention=attention, **options)
    with tracing_with(interprets_flash=True):
        history = model.fit(
            x[:, :-1], x[:, 1:], batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, cores=cores
        )
    return history.history["loss"], model.get_weights(), model


@pytest.mark.cores(1, 8, quick=False)
@pytest.mark.soak
def test_fifty_steps_equal_plain_attention(cores):
    torch.manual_seed(0)
    net, how = GPT(), {"rows": 16, "epochs": 25, "batch_size": 8 // cores}
    losses, weights, model = trained(net, cores, attention="flash", **how)
    expected, ends, plain = trained(net, cores, attention="plain", **how)
    assert model.steps_taken == 50 and expected[-1] < 0.5 * expected[0]
    np.testing.assert_allclose(losses, expected, rtol=2e-3)
    for ours, theirs in zip(weights, ends, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-3)
    assert model.report().attention == {"blocks.0": "flash", "blocks.1": "flash"}
    assert set(model.report().traced.values()) == {""}  # the step is replayed
    x = texts(16)
    with tracing_with(interprets_flash=True):
        loss = model.evaluate(x[:, :-1], x[:, 1:], batch_size=8 // cores, verbose=0)
    assert loss == pytest.approx(plain.evaluate(x[:, :-1], x[:, 1:], batch_size=8 // cores, verbose=0), rel=2e-3)


OPTIONS = {
    "remat": {"remat": True},
    "fsdp and what is kept": {"shard": {"blocks.*.weight": 0}, "remat": "dots"},
    "accumulated": {"accumulate_steps": 2},
    "joined": {"steps_per_execution": 2},
}


@pytest.mark.slow
@pytest.mark.cores(1, 8, quick=False)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("remat", marks=pytest.mark.soak_on(1)),
        pytest.param("fsdp and what is kept", marks=pytest.mark.soak),
        pytest.param("accumulated", marks=pytest.mark.soak),
        pytest.param("joined", marks=pytest.mark.soak_on(8)),
    ],
)
def test_flash_with_other_options(cores, name):
    torch.manual_seed(0)
    net, how = GPT(), {"rows": 4 * cores, "batch_size": 1} | OPTIONS[name]
    losses, weights, model = trained(net, cores, attention="flash", **how)
    expected, ends, _ = trained(net, cores, attention="plain", **how)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for ours, theirs in zip(weights, ends, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert model.report().attention == {"blocks.0": "flash", "blocks.1": "flash"}


class Asks(nn.Module):
    """A layer that requests a form of attention, without computing it."""

    def forward(self, *given):
        choose_flash(*given)


class AsksByAnotherName(nn.Module):
    """The same, with another name for `self`."""

    def forward(layer, *given):  # noqa: N805
        choose_flash(*given)


def form_of(asked, kind="TPU v5 lite", *, shape=(1, 2, 4096, 64), dtype=BF16, mask=None, dropout=0.0, layer=None):
    """Return the form of an attention on a kind of device, and the warnings."""
    forms, layer, x = AttentionForms(asked), layer or Asks(), torch.empty(shape, dtype=dtype, device="meta")
    place = SimpleNamespace(device=torch.device("meta"))
    with warnings.catch_warnings(record=True) as told, tracing_with(kind=kind), choose_attention(forms, place):
        warnings.simplefilter("always")
        for _ in range(2):
            layer(x, x, mask, False, dropout)
    return forms.of_layers.get(layer), [str(one.message) for one in told]


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite"])
def test_long_texts_use_the_kernel(kind):
    assert form_of("auto", kind) == form_of("flash", kind) == ("flash", [])
    assert form_of("plain", kind) == (None, [])
    assert form_of("auto", kind, layer=AsksByAnotherName()) == ("flash", [])


PLAIN = {
    "a v3": ({"kind": "TPU v3"}, "there is no kernel for a TPU v3"),
    "a v2": ({"kind": "TPU v2"}, "there is no kernel for a TPU v2"),
    "a CPU": ({"kind": "cpu"}, "there is no kernel for a cpu"),
    "dropout": ({"dropout": 0.1}, "the kernel has no dropout"),
    "float32": ({"dtype": F32}, "the kernel isn't exact in float32"),
    "three dimensions": ({"shape": (2, 4096, 64)}, "got 3 dimensions"),
    "a bias": ({"mask": torch.ones(64, 64, device="meta")}, "the kernel takes masks of positions"),
    "any mask": ({"mask": torch.ones(64, 64, dtype=torch.bool, device="meta")}, "the kernel takes masks of positions"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_unsupported_attention_stays_plain(name):
    how, reason = PLAIN[name]
    form, told = form_of("flash", **how)
    assert form.startswith("plain: ") and reason in form
    (sentence,) = told  # once, though it is traced twice
    assert sentence.startswith("attention='flash', but Asks uses plain attention: ") and reason in sentence
    assert form_of("auto", **how) == (form, [])


def test_without_jax_attention_stays_plain(monkeypatch):
    monkeypatch.setattr(attention_choice, "find_spec", lambda name: None)
    form, (sentence,) = form_of("flash")
    assert (
        form.startswith("plain: the kernel needs JAX, which isn't installed: pip install jax==")
        and form[7:] in sentence
    )


def test_few_keys_stay_plain_unless_flash_is_requested():
    assert form_of("auto", shape=(1, 2, 128, 64)) == ("plain: 128 positions are fewer than 1024", [])
    assert form_of("flash", shape=(1, 2, 128, 64)) == ("flash", [])


def test_a_mask_of_keys_uses_the_kernel():
    for shape in ((4096,), (1, 4096), (1, 1, 1, 4096)):
        assert form_of("flash", mask=torch.ones(shape, dtype=torch.bool, device="meta")) == ("flash", [])


def test_compile_knows_the_forms():
    model = tpufit.Model(nn.Linear(1, 1))
    with pytest.raises(UnknownNameError, match="unknown attention 'flsh': did you mean 'flash'"):
        model.compile("sgd", "mse", attention="flsh")


class Encoder(nn.Module):
    """`nn.TransformerEncoder` for texts of several lengths; each word attends to the previous words or to all."""

    def __init__(self, causal):
        super().__init__()
        self.words, self.causal = nn.Embedding(WORDS, WIDTH), causal
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        mask = torch.ones(TIME, TIME, dtype=torch.bool, device=x.device).triu(1) if self.causal else None
        padding = torch.arange(TIME, device=x.device) >= TIME - 5 * x[:, :1]
        return self.head(self.encoder(self.words(x), mask, padding, is_causal=self.causal)).transpose(1, 2)


class Masked(GPT):
    """Its blocks get a mask of padding, and combine it with a causal mask themselves."""

    class Block(Block):
        def forward(self, x, padding):
            places = torch.arange(TIME, device=x.device)
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, (places <= places[:, None]) & padding[:, None, None])
            return x + self.wide(x + self.out(y.transpose(1, 2).flatten(2)))

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x):
        padding = torch.arange(TIME, device=x.device) < TIME - 5 * x[:, :1]
        x = self.words(x) + self.places
        for block in self.blocks:
            x = block(x, padding)
        return self.head(x).transpose(1, 2)


MASKED = {
    "nn.MultiheadAttention": (lambda: Encoder(causal=False), {}),
    "nn.MultiheadAttention, causal": (lambda: Encoder(causal=True), {}),
    "blocks that make masks": (Masked, {}),
    "blocks that make masks, with remat": (Masked, {"remat": True}),
}


SOAKED = dict.fromkeys(("nn.MultiheadAttention", "blocks that make masks"), pytest.mark.soak)  # parts of the others


@pytest.mark.slow
@pytest.mark.cores(1, 8, quick=False)
@pytest.mark.parametrize("name", [pytest.param(name, marks=SOAKED.get(name, ())) for name in MASKED])
@pytest.mark.soak_on(1)
def test_masks_of_modules_are_recognized(cores, name):
    make, options = MASKED[name]
    torch.manual_seed(0)
    net, how = make(), {"rows": 2 * cores, "batch_size": 1} | options
    losses, weights, model = trained(net, cores, attention="flash", **how)
    expected, ends, _ = trained(net, cores, attention="plain", **how)
    assert set(model.report().attention.values()) == {"flash"} and len(model.report().attention) == 2
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for ours, theirs in zip(weights, ends, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
