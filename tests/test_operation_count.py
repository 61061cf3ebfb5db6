"""The operations of a step, counted during compilation, and the speeds: tokens per second, share of the peak."""

import pytest
import torch
from engines import engine_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import tpufit
from tpufit.callbacks import TensorBoard
from tpufit.runtime import operation_count, placement
from tpufit.step.tally import Tally
from tpufit.utils import hardware

PEAK = 1e9


@pytest.fixture
def peak(monkeypatch):
    """Pretend that this process's cores have a known peak, like a TPU's."""
    monkeypatch.setattr(placement.CorePlacement, "peak", PEAK)


class Computing(tpufit.Model):
    """Its step computes a function of the weights."""

    function = staticmethod(torch.matmul)

    def train_step(self, batch):
        loss = self.function(*self.module).sum()
        self.apply_gradients(loss)
        return {"loss": loss}


def traced(function, *tensors):
    """Return the operations of a function's forward and backward pass on the device."""
    model = Computing(nn.ParameterList(tensors))
    model.function = function
    model.compile("sgd")
    model.fit(torch.ones(1, 1), batch_size=1, verbose=0, cores=1)
    return model.report().passes[-1].operations


def counted_by_pytorch(function, *tensors):
    own = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function(*own).sum().backward()
    return counter.get_total_flops()


@pytest.mark.cores(1)
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        pytest.param(torch.matmul, [(4, 6), (6, 5)], id="a product"),
        pytest.param(torch.matmul, [(3, 4, 6), (3, 6, 5)], id="a batch of products"),
        pytest.param(lambda a, b: ((a + 1j * a) @ (b + 1j * b)).real, [(4, 6), (6, 5)], id="complex numbers"),
        pytest.param(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), [(2, 3, 7, 8)] * 3, id="attention"),
        pytest.param(lambda x, w: F.conv2d(x, w), [(4, 3, 9, 8), (5, 3, 3, 2)], id="a convolution"),
        pytest.param(lambda x, w: F.conv1d(x, w), [(4, 3, 9), (5, 3, 4)], id="in one dimension"),
        pytest.param(lambda x, w: F.conv3d(x, w), [(2, 3, 5, 6, 7), (4, 3, 2, 3, 1)], id="in three dimensions"),
    ],
)
def test_operations_equal_pytorchs_counts(cores, peak, function, shapes):
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in shapes]
    assert traced(function, *tensors) == counted_by_pytorch(function, *tensors)


# PyTorch's counter includes padding, dilation and groups. Here each term is counted.


@pytest.mark.cores(1)
@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        ({"padding": 1}, [(2, 4, 7, 6), (6, 4, 3, 3)]),
        ({"stride": 2, "padding": (2, 1)}, [(2, 4, 7, 8), (6, 4, 5, 3)]),
        ({"dilation": 2, "padding": 2}, [(2, 4, 7, 6), (6, 4, 3, 3)]),
        ({"groups": 2}, [(2, 4, 7, 6), (6, 2, 3, 3)]),
        ({"groups": 4, "stride": 2}, [(2, 4, 7, 7), (4, 1, 3, 3)]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_convolution_counts_no_padding(cores, peak, options, shapes):
    images, kernel = map(torch.ones, shapes)
    # With ones, each result is the number of its terms. The backward pass has each term twice: for images and kernel.
    terms = int(F.conv2d(images, kernel, **options).sum())
    assert traced(lambda x, w: F.conv2d(x, w, **options), images, kernel) == 3 * 2 * terms


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, x):
        return self.head(self.words(x)).mean(1)


def text_model():
    tpufit.set_random_seed(0)
    model = tpufit.Model(Text())
    model.compile("sgd", "cross_entropy", scale_lr=None)
    return model, torch.randint(50, (64, 12)), torch.randint(50, (64,))


# The head's product and, in the backward pass, one for its weight and one for its input.
OF_A_STEP = 3 * 2 * (16 * 12) * 8 * 50


@pytest.mark.cores(1, 8, quick=True)
@pytest.mark.parametrize("joined", [1, 2])
def test_a_fit_counts_tokens_and_operations(cores, peak, joined):
    model, x, y = text_model()
    model.compile("sgd", "cross_entropy", scale_lr=None, steps_per_execution=joined)
    model.fit(x, y, batch_size=16 // cores, epochs=2, cores=cores, verbose=0, shuffle=False)
    assert model.speed(10.0) == {"tokens_per_second": 10 * 16 * 12, "share_of_peak": 10 * OF_A_STEP / PEAK}
    report = model.report()
    last = report.passes[-1]
    assert (last.tokens, last.operations) == (64 * 12, 4 * OF_A_STEP)
    first = last.begun
    assert (first.steps, first.rows, first.tokens, first.operations) == (
        *(n // (4 // joined) for n in (last.steps, last.rows, last.tokens, last.operations)),
    )
    seconds = last.seconds - first.seconds
    assert report.tokens_per_second == (last.tokens - first.tokens) / seconds
    assert report.share_of_peak == (last.operations - first.operations) / seconds / PEAK
    assert "share of the peak" in str(report) and "tokens/s" in str(report)
    assert "predicted" not in str(report)
    engine_of(model).log.predicted = 2 / last.per_second("steps")
    assert ": 0.50 times" in str(model.report())


@pytest.mark.cores(1)
def test_on_a_cpu_nothing_is_counted(cores, monkeypatch):
    monkeypatch.setattr(operation_count, "count_operations", lambda *_: pytest.fail("it was counted"))
    model, x, y = text_model()
    model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    assert model.speed(10.0) == {"tokens_per_second": 10 * 16 * 12}
    assert model.report().share_of_peak is None and "peak" not in str(model.report())


@pytest.mark.cores(1)
def test_images_and_masks_arent_tokens(cores):
    model = tpufit.Model(nn.Linear(12, 2))
    model.compile("sgd", "mse")
    model.fit(torch.zeros(32, 12), torch.zeros(32, 2), batch_size=16, verbose=0)
    assert model.speed(10.0) == {}


def test_nothing_is_known_before_the_first_fit():
    assert text_model()[0].speed(10.0) == {}
    assert Tally().speed(10.0, PEAK) == {}


@pytest.mark.cores(1)
def test_the_bar_and_tensorboard_show_speeds(cores, peak, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tpufit.Model, "memory_used", 1 << 20)
    model, x, y = text_model()
    model.fit(x, y, batch_size=16, epochs=2, verbose=2, callbacks=[TensorBoard(tmp_path, write_graph=False)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Epoch 2/2")]
    assert len(lines) == 1 and " tokens/s - " in lines[0] and "% of the peak - loss" in lines[0]
    events = EventAccumulator(str(tmp_path / "train")).Reload()
    tags = {"epoch_tokens_per_second", "epoch_share_of_peak", "epoch_memory_used"}
    assert tags <= set(events.Tags()["scalars"])
    assert all(event.value > 0 for tag in tags for event in events.Scalars(tag))
    of_share, of_tokens = (events.Scalars(f"epoch_{name}")[-1].value for name in ("share_of_peak", "tokens_per_second"))
    assert of_share / of_tokens == pytest.approx(OF_A_STEP / PEAK / (16 * 12))


@pytest.mark.cores(1)
def test_the_peak_is_of_this_hosts_chips(cores, monkeypatch):
    here = tpufit.runtime.start(cores, "the test")
    assert tpufit.runtime.make_placement(here).peak is None
    for chip, each in (("0x0063", 197e12), ("0x006f", 918e12), ("0x0027", None), ("0x0076", 1153.5e12)):
        monkeypatch.setattr(placement, "platform", lambda: "TPU")
        monkeypatch.setattr(hardware, "find_chips", lambda chip=chip: [hardware.CHIPS[chip]])
        assert tpufit.runtime.make_placement(here).peak == each


def test_a_kernels_declared_work_is_counted():
    name = "a/kernels[k=10/64/5/0;l=7/64/5/0]/l_1"
    call = f'custom-call(%q), custom_call_target="tpu_custom_call", metadata={{op_name="{name}"}}'
    assert operation_count.count_operations(call) == 7 and operation_count.count_operations(call, cores=8) == 56
    assert operation_count.count_operations(call.replace("kernels[", "others[")) == 0
