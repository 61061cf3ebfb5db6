"""What a step computes, counted as it is compiled, and the speeds that follow: tokens a second, share of the peak."""

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
from tpufit.runtime import operations, placement
from tpufit.runtime.bindings import xla
from tpufit.step.tally import Tally
from tpufit.utils import hardware

PEAK = 1e9


@pytest.fixture
def peak(monkeypatch):
    """The cores of this process have a peak that is known, as a TPU's."""
    monkeypatch.setattr(placement.CorePlacement, "peak", PEAK)


def traced(function, *tensors):
    """The operations of a function's forward and backward pass on the device."""
    import torch_xla

    own = [t.to(torch_xla.device()).requires_grad_(t.is_floating_point()) for t in tensors]
    result = function(*own)
    result.sum().backward()
    return operations.operations_in(xla()._get_xla_tensors_hlo([result, *(t.grad for t in own if t.grad is not None)]))


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
        pytest.param(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), [(2, 3, 7, 8)] * 3, id="attention"),
        pytest.param(lambda x, w: F.conv2d(x, w), [(4, 3, 9, 8), (5, 3, 3, 2)], id="a convolution"),
        pytest.param(lambda x, w: F.conv1d(x, w), [(4, 3, 9), (5, 3, 4)], id="in one dimension"),
        pytest.param(lambda x, w: F.conv3d(x, w), [(2, 3, 5, 6, 7), (4, 3, 2, 3, 1)], id="in three dimensions"),
    ],
)
def test_operations_are_those_that_pytorch_counts(cores, function, shapes):
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in shapes]
    assert traced(function, *tensors) == counted_by_pytorch(function, *tensors)


# PyTorch's counter takes padding, holes and groups for work. Here the terms are counted one by one.


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
def test_a_convolution_has_the_terms_that_meet_no_padding(cores, options, shapes):
    images, kernel = map(torch.ones, shapes)
    # Of ones each result is the number of its terms. The backward pass has each term twice: for images and kernel.
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


# The head's product and, backwards, one for its weight and one for its input.
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
    assert report.tokens_per_second == last.tokens / last.seconds
    assert report.share_of_peak == last.operations / last.seconds / PEAK
    assert "share of the peak" in str(report) and "tokens a second" in str(report)
    assert "predicted" not in str(report)
    engine_of(model).log.predicted = 2 * last.seconds / last.steps
    assert ": 0.50 times" in str(model.report())


@pytest.mark.cores(1)
def test_on_a_cpu_there_is_no_share_and_nothing_is_counted(cores, monkeypatch):
    monkeypatch.setattr(operations, "operations_in", lambda *_: pytest.fail("it was counted"))
    model, x, y = text_model()
    model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    assert model.speed(10.0) == {"tokens_per_second": 10 * 16 * 12}
    assert model.report().share_of_peak is None and "peak" not in str(model.report())


@pytest.mark.cores(1)
def test_pictures_and_masks_are_no_tokens(cores):
    model = tpufit.Model(nn.Linear(12, 2))
    model.compile("sgd", "mse")
    model.fit(torch.zeros(32, 12), torch.zeros(32, 2), batch_size=16, verbose=0)
    assert model.speed(10.0) == {}


def test_nothing_is_known_before_the_first_fit():
    assert text_model()[0].speed(10.0) == {}
    assert Tally().speed(10.0, PEAK) == {}


@pytest.mark.cores(1)
def test_the_bar_and_tensorboard_show_them(cores, peak, tmp_path, capsys, monkeypatch):
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
def test_the_peak_is_that_of_the_chips_of_this_host(cores, monkeypatch):
    here = tpufit.runtime.start(cores, "the test")
    assert placement.placement_on(here).peak is None
    for chip, each in (("0x0063", 197e12), ("0x006f", 918e12), ("0x0027", None), ("0x0076", None)):
        monkeypatch.setattr(placement, "platform", lambda: "TPU")
        monkeypatch.setattr(hardware, "chips", lambda chip=chip: [hardware.CHIPS[chip]])
        assert placement.CorePlacement(here).peak == each


def test_a_kernel_counts_what_it_says_on_each_core():
    name = "a/kernels[k=10/64/5/0;l=7/64/5/0]/l_1"
    call = f'custom-call(%q), custom_call_target="tpu_custom_call", metadata={{op_name="{name}"}}'
    assert operations.operations_in(call) == 7 and operations.operations_in(call, cores=8) == 56
    assert operations.operations_in(call.replace("kernels[", "others[")) == 0
