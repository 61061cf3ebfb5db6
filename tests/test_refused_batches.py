"""An invalid batch gives a clear error, and training continues with valid data."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tpufit
from tpufit.errors import ArgumentError, BatchError, DataError, PlacementError

pytestmark = [pytest.mark.cores(1, 8, timeout=300, quick=False), pytest.mark.soak_on(8)]

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(48, 4)).astype("float32")
Y = GENERATOR.integers(0, 3, 48)
WIDE = GENERATOR.normal(size=(48, 5)).astype("float32")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x).tanh())


def compiled(loss="cross_entropy", **arguments):
    torch.manual_seed(0)
    model = tpufit.Model(Net())
    model.compile("adam", loss, **arguments)
    return model


def fit(model, cores, x=X, y=Y):
    return model.fit(x, y, 32 // cores, 2, verbose=0, cores=cores, shuffle=False).history["loss"]


@pytest.mark.parametrize("eagerly", [False, True])
def test_rows_of_another_width(cores, eagerly):
    model, twin = compiled(run_eagerly=eagerly), compiled(run_eagerly=eagerly)
    assert fit(model, cores) == fit(twin, cores)
    says = (
        r"layer 'body', Linear\(in_features=4, .*\), fails on a batch of x: float32 \((32|4), 5\)\. .* PyTorch says: "
    )
    for wrong in (
        lambda: fit(model, cores, WIDE),
        lambda: model.evaluate(WIDE, Y, batch_size=32 // cores, verbose=0),
        lambda: model.predict(WIDE, batch_size=32 // cores, verbose=0),
        lambda: model.train_on_batch(WIDE[:32], Y[:32]),
    ):
        with pytest.raises(BatchError, match=says) as refusal:
            wrong()
        assert type(refusal.value.__cause__) is RuntimeError
        assert str(refusal.value).endswith(str(refusal.value.__cause__))
    tpufit.set_random_seed(0)
    after = fit(model, cores)
    tpufit.set_random_seed(0)
    assert after == fit(twin, cores)


@pytest.mark.parametrize(
    "misfit",
    [
        lambda x: F.linear(x, x[:3, :3]),
        lambda x: F.linear(x, x[:3], x[0]),
        lambda x: x @ x,
        lambda x: x[0] @ x[:, 0],
        lambda x: torch.mm(x, x),
        lambda x: x.mv(x[:, 0]),
        lambda x: torch.addmm(x, x.T, x[:3]),
        lambda x: torch.baddbmm(x[None], x[None], x[None]),
        lambda x: torch.stack([x, x[:, :2]]),
        lambda x: F.cross_entropy(x, x.long()[:, :2]),
    ],
)
def test_mismatched_shapes_dont_end_the_process(cores, misfit):
    class Misfit(Net):
        def forward(self, x):
            misfit(x)
            return super().forward(x)

    model = tpufit.Model(Misfit())
    model.compile("sgd", "cross_entropy")
    with pytest.raises(BatchError, match="the module, Misfit, fails on a batch of x"):
        fit(model, cores)


def test_a_failing_module_is_named_and_other_errors_pass(cores):
    class Joining(Net):
        def forward(self, x):
            if wrong is not None:
                raise wrong
            return super().forward(x) + torch.cat([x, x[:, :2]])

    wrong, model = None, tpufit.Model(Joining())
    model.compile("sgd", "cross_entropy")
    with pytest.raises(BatchError, match=r"the module, Joining, fails on a batch of x: float32 \(32, 4\)"):
        fit(model, cores)
    for wrong in (NotImplementedError("of its own"), ValueError("of its own"), TypeError("of its own")):
        with pytest.raises(type(wrong), match="^of its own$"):
            fit(model, cores)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (
            {"a": X, "b": X},
            r"x is a dict of 'a' and 'b', and Net.forward\(x\) names none of the keys, so it gets the",
        ),
        ((X, X), r"x is a tuple of 2, so the module is called as Net\(..., ...\), but its forward takes \(x\)"),
    ],
    ids=["dict", "tuple"],
)
def test_arguments_that_the_module_doesnt_accept(cores, x, says):
    model = compiled()
    with pytest.raises(BatchError, match=says) as refusal:
        fit(model, cores, x)
    assert type(refusal.value.__cause__) is TypeError
    assert np.isfinite(fit(model, cores, {"x": X})).all()


@pytest.mark.soak_on(8)
@pytest.mark.parametrize(
    ("loss", "wrong", "says"),
    [
        ("mse", WIDE, r"loss mse fails .* output: float32 \(32, 3\), target: float32 \(32, 5\)\. Expected targets of "),
        (nn.BCEWithLogitsLoss(), WIDE, r"loss BCEWithLogitsLoss fails .* target: float32 \(32, 5\)\. Expected targets"),
        (lambda p, t: ((p - t) ** 2).mean(), WIDE, r"loss <lambda> fails .* target: float32 \(32, 5\)"),
        ("cross_entropy", Y[:, None], r"target: int64 \(32, 1\)\. Expected classes .* of shape \(32,\), or prob"),
        ("cross_entropy", X[:, 0], r"target: float32 \(32,\)\. Expected classes"),  # XLA would compute NaN
        (nn.NLLLoss(), X[:, :3], r"Expected classes as the targets: whole numbers of shape \(32,\)$"),
    ],
)
def test_targets_that_the_loss_cannot_take(cores, loss, wrong, says):
    model = compiled(loss)
    right = X[:, :3] if wrong is WIDE else Y
    with pytest.raises(BatchError, match=says):
        fit(model, cores, X, wrong)
    assert np.isfinite(fit(model, cores, X, right)).all()


def test_class_probabilities_are_valid_targets(cores):
    shares = np.eye(3, dtype="float32")[Y] * 0.9 + 0.1 / 3
    torch.manual_seed(0)
    expected = F.cross_entropy(Net()(torch.from_numpy(X)), torch.from_numpy(shares)).item()
    loss = compiled().evaluate(X, shares, 32 // cores, verbose=0, cores=cores)
    assert loss == pytest.approx(expected, abs=1e-6)


def test_data_without_rows(cores):
    model = compiled()
    nothing = TensorDataset(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long))
    for data, says in [
        (DataLoader(nothing, 4), "x is empty: the loader has no batches"),
        (nothing, "x is empty: it has no rows"),
        (X[:0], "x is empty: it has no rows"),
        ([], "x yielded no batches"),
    ]:
        for run in (model.fit, model.evaluate, model.predict):
            with pytest.raises(DataError, match=says):
                run(data, verbose=0, cores=cores)
    batches = [(X[:4], Y[:4])] * cores + [(X[:0], Y[:0])] * cores
    for run in (model.fit, model.evaluate, model.predict):
        with pytest.raises(
            BatchError, match=r"a batch must have rows, but the data gave x: float32 \(0, 4\), y: int64"
        ):
            run(batches, verbose=0)
    with pytest.raises(BatchError, match="must have rows"):
        model.train_on_batch(X[:0], Y[:0])
    assert np.isfinite(fit(model, cores)).all()


def test_parts_for_a_custom_step_arent_labels(cores):
    class Four(tpufit.Model):
        def train_step(self, batch):
            x, number, scale, y = batch
            loss = self.compute_loss(x, y, self(x * scale))
            self.apply_gradients(loss)
            return {"loss": loss, "number": number.sum()}

    torch.manual_seed(0)
    model = Four(Net())
    model.compile("adam", "cross_entropy")
    rows = 16 // cores
    parts = (torch.tensor(X), torch.full((48,), 7), torch.ones(48, 1), torch.tensor(Y))
    batches = list(zip(*(part.split(rows) for part in parts), strict=True))
    history = model.fit(batches, epochs=1, verbose=0, cores=cores).history
    assert history["number"] == [7 * 16]


REFUSED = {
    "None": ([None, None], "must have a tensor or an array, but the data gave None"),
    "text": (["abc", "de"], r"but the data gave text \('abc'\)"),
    "nothing": ([(), ()], "but the data gave a tuple of 0"),
    "no x": ([(None, Y)] * 2, "x must be tensors or arrays of numbers, but the data gave None"),
    "an object": ([(object(), torch.from_numpy(Y))] * 2, "the data gave an object"),
    "x of objects": ([(X.astype(object), Y)] * 2, "the data gave an array of dtype object"),
    "y of objects": ([(X, Y.astype(object))] * 2, "the targets must be .* gave an array of dtype object"),
    "y of texts": ([(X, ["a"] * 48)] * 2, r"the targets must be .* gave a list of \d+, the first of which is text"),
    "sparse": ([(torch.tensor(X).to_sparse(), Y)] * 2, r"sparse \(torch.sparse_coo\): pass x.to_dense\(\)"),
    "nested": (
        [(torch.nested.nested_tensor([*torch.tensor(X[:2])], layout=torch.jagged), Y[:2])] * 2,
        "nested: pad it",
    ),
    "quantized": ([(torch.quantize_per_tensor(torch.tensor(X), 0.1, 0, torch.qint8), Y)] * 2, "quantized"),
    "meta": ([(torch.tensor(X).to("meta"), Y)] * 2, "meta, which has no values"),
    "packed": ([(nn.utils.rnn.pack_sequence([torch.tensor(X[:2])]), Y[:1])] * 2, "PackedSequence, whose rows"),
}


@pytest.mark.parametrize(("batches", "says"), REFUSED.values(), ids=REFUSED)
def test_batches_without_dense_numbers(cores, batches, says):
    model = compiled()
    for data in (batches, iter(batches)):
        with pytest.raises(BatchError, match=says) as refusal:
            model.fit(data, verbose=0, cores=cores)
        assert len(str(refusal.value)) < 300
    assert np.isfinite(fit(model, cores)).all()


def test_a_sparse_batch_after_dense_ones_of_its_shape(cores):
    x, y = torch.tensor(X), torch.tensor(Y)
    with pytest.raises(BatchError, match="sparse"):
        compiled().fit(iter([(x, y)] * 2 * cores + [(x.to_sparse(), y)]), verbose=0, cores=cores)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0].mean(1)


IMAGES = GENERATOR.integers(0, 255, (16, 2, 6, 6))
LAYERS = {
    "linear": (lambda: nn.Linear(6, 3), IMAGES[:, 0, 0]),
    "linear of images": (lambda: nn.Sequential(nn.Linear(6, 3, bias=False), nn.Flatten()), IMAGES),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.Flatten()), IMAGES),
    "convolution that keeps its size": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3, padding="same"), nn.Flatten()),
        IMAGES[:, 0, :2],
    ),
    "transposed convolution": (lambda: nn.Sequential(nn.ConvTranspose2d(2, 1, 2), nn.Flatten()), IMAGES),
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm2d(2), nn.Flatten()), IMAGES),
    "layer norm": (lambda: nn.LayerNorm(6), IMAGES[:, 0, 0]),
    "attention": (Attending, IMAGES[:, 0, :, :4]),
}


@pytest.mark.parametrize(("dtype", "precision"), [("uint8", "fp32"), ("int64", "bf16"), ("float64", "fp32")])
@pytest.mark.parametrize("layer", LAYERS)
def test_dtypes_that_pytorch_refuses(cores, layer, dtype, precision):
    make, x = LAYERS[layer]
    net = make()
    net = nn.Sequential(Double(), net) if dtype == "float64" else net
    model = tpufit.Model(net)
    model.compile("sgd", lambda pred, y: (pred[0] if isinstance(pred, tuple) else pred).mean(), precision=precision)
    with pytest.raises(BatchError, match="Give it rows in the dtype of its weights"):
        model.fit(x.astype(dtype), np.zeros(16), 16 // cores, verbose=0, cores=cores)


class Double(nn.Module):
    """Never a dtype of the data, which are sent as float32."""

    def forward(self, x):
        return x.double()


class Recurrent(nn.Module):
    """The mean of the outputs, and the last output, of an LSTM over sequences of several lengths."""

    def __init__(self, lengths_for=None):
        super().__init__()
        self.layer, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(16, 1)
        self.lengths_for = lengths_for  # for packing; None computes on padded rows, as the error says

    def forward(self, x, lengths):
        if self.lengths_for is not None:
            given = self.lengths_for(lengths)
            packed = nn.utils.rnn.pack_padded_sequence(x, given, batch_first=True, enforce_sorted=False)
            packed, (last, _) = self.layer(packed)
            y, last = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0], last[-1]
        else:
            y, _ = self.layer(x)
            last = y[torch.arange(len(y), device=y.device), lengths - 1]
            mask = torch.arange(y.shape[1], device=y.device) < lengths[:, None]
            y = y * mask[..., None]
        return self.head(torch.cat([y.sum(1) / lengths[:, None], last], 1))


@pytest.mark.parametrize("lengths_for", [torch.Tensor.cpu, torch.Tensor.tolist])
def test_packed_sequences_are_refused_with_a_way_that_works(cores, lengths_for):
    torch.manual_seed(0)
    rows, lengths = torch.randn(32, 7, 4), torch.randint(1, 8, (32,))
    targets = rows.sum((1, 2))[:, None]
    model = tpufit.Model(Recurrent(lengths_for))
    model.compile("sgd", "mse")
    with pytest.raises(BatchError, match=r"pack_padded_sequence can't run on the device.*y\[torch.arange.* < lengths"):
        model.fit((rows, lengths), targets, 32 // cores, verbose=0, cores=cores)
    plain = Recurrent(torch.Tensor.cpu)
    padded = Recurrent()
    padded.load_state_dict(plain.state_dict())
    model = tpufit.Model(padded)
    model.compile(lambda p: torch.optim.SGD(p, 0.1), "mse", scale_lr=None)
    model.fit((rows, lengths), targets, 32 // cores, 3, verbose=0, cores=cores)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(plain(rows, lengths), targets).backward()
        optimizer.step()
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], expected, rtol=0, atol=1e-5)


def test_a_batch_norm_of_one_row(cores):
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model = tpufit.Model(net)
    model.compile("sgd", "cross_entropy")
    with pytest.raises(BatchError, match=r"a batch norm can't train on a batch of one row.*drop_last=True"):
        model.fit(X[:33], Y[:33], 32 // cores, verbose=0, cores=cores)


@pytest.mark.parametrize("bag", [False, True])
def test_sparse_embeddings(cores, bag):
    kind = nn.EmbeddingBag if bag else nn.Embedding
    model = tpufit.Model(nn.Sequential(kind(9, 3, sparse=True), nn.Flatten()))
    model.compile("sgd", lambda pred, y: pred.mean())
    with pytest.raises(ArgumentError, match="has sparse gradients.*sparse=False") as refusal:
        model.fit(torch.ones(16, 2, dtype=torch.int64), np.zeros(16), 16 // cores, verbose=0, cores=cores)
    assert len(str(refusal.value)) < 300


def test_the_module_itself_on_host_data_after_fit(cores):
    model = compiled()
    fit(model, cores)
    with pytest.raises(PlacementError, match=r"Net has been on the device.*model\(x\).*model.to_cpu\(\)"):
        model.module(torch.as_tensor(X))
    expected = model(torch.as_tensor(X))
    torch.testing.assert_close(model.to_cpu()(torch.as_tensor(X)), expected, rtol=0, atol=1e-6)
    assert not model.module._forward_pre_hooks


class Spectrum(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.head, self.how = nn.Linear(9, 1), how

    def forward(self, x):
        signal = (
            torch.fft.rfft(x)
            if self.how != "stft"
            else torch.stft(x, 16, 4, window=torch.hann_window(16, device=x.device), return_complex=True)
        )
        if self.how == "zero":
            signal = signal * 0
        size = abs(signal) if self.how == "operator" else torch.abs(signal) if self.how == "function" else signal.abs()
        return self.head(size if self.how != "stft" else size.mean(-1))


@pytest.mark.filterwarnings("ignore:the train step is traced again")  # torch_xla's transforms run on the host
@pytest.mark.parametrize("how", ["method", "operator", "function", "zero", "stft"])
def test_sizes_of_complex_numbers(cores, how):
    torch.manual_seed(0)
    x, y = torch.randn(16, 16), torch.randn(16, 1)
    net, plain = (nn.Sequential(Scaled(), Spectrum(how)) for _ in range(2))
    plain.load_state_dict(net.state_dict())
    model = tpufit.Model(net)
    model.compile(lambda p: torch.optim.SGD(p, 0.001), "mse", scale_lr=None)
    model.fit(x, y, 8 // cores, 2, verbose=0, cores=cores, shuffle=False)
    optimizer = torch.optim.SGD(plain.parameters(), 0.001)
    for _ in range(2):
        for rows in (slice(0, 8), slice(8, 16)):
            optimizer.zero_grad()
            F.mse_loss(plain(x[rows]), y[rows]).backward()
            optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-5)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x):
        return x * self.scale


class Products(nn.Module):
    """Uses its weights in an operation for which XLA needs equal dtypes."""

    def __init__(self, compute):
        super().__init__()
        self.compute, self.weight, self.bias = compute, nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.compute(x, self.weight, self.bias)


@pytest.mark.parametrize(
    "compute",
    [lambda x, weight, bias: torch.addmm(bias, x, weight), lambda x, weight, bias: torch.cdist(x, weight.t()) + bias],
    ids=["addmm", "cdist"],
)
@pytest.mark.parametrize("run_eagerly", [True, False])
def test_rows_beside_weights_in_bfloat16(cores, compute, run_eagerly):
    model = tpufit.Model(Products(compute).bfloat16())
    model.compile("sgd", "mse", run_eagerly=run_eagerly)
    with pytest.raises(BatchError, match="weights.*compile\\(..., precision='bf16-true'\\) makes both bfloat16"):
        model.fit(torch.ones(16, 4), torch.ones(16, 2), 16 // cores, verbose=0, cores=cores)
