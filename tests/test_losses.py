"""Losses: names and objects as in PyTorch, row weights as in Keras, and checks of labels."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from plain_steps import plain_steps
from torch import nn
from torch.nn import functional as F

import tpufit
from tpufit import runtime
from tpufit.errors import ArgumentError, BatchError, LabelError, NotCompiledError, UnknownNameError
from tpufit.losses import NAMES, Loss, require_loss
from tpufit.runtime.driver import driver
from tpufit.runtime.ops.kernels import replace_kernels

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.1, 3.0], [0.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
CLASSES = torch.tensor([0, 2, 2, 1])


def test_a_name_a_module_and_a_function_are_the_same_loss():
    expected = F.cross_entropy(LOGITS, CLASSES)
    for loss in ("cross_entropy", nn.CrossEntropyLoss(), F.cross_entropy, lambda p, t: F.cross_entropy(p, t)):
        assert torch.equal(Loss(loss)(LOGITS, CLASSES), expected)


def test_every_name_computes():
    for name in NAMES:
        classes = name in ("cross_entropy", "nll_loss")
        prediction = LOGITS.log_softmax(1) if classes else LOGITS.sigmoid()
        assert Loss(name)(prediction, CLASSES if classes else LOGITS.sigmoid()).dim() == 0


def test_bfloat16_outputs_are_compared_in_float32():
    assert Loss("mse_loss")(torch.ones(2, dtype=torch.bfloat16), torch.zeros(2)).dtype is torch.float32


BY_ELEMENT = [name for name in NAMES if name not in ("cross_entropy", "nll_loss", "multilabel_soft_margin_loss")]


@pytest.mark.parametrize("loss", [*BY_ELEMENT, nn.MSELoss(), nn.BCELoss(), nn.HuberLoss(delta=0.5)], ids=str)
def test_targets_have_the_outputs_shape_and_type(loss):
    prediction, numbers = torch.tensor([0.2, 0.9, 0.6]), torch.tensor([0, 1, 1])
    weight, function = torch.tensor([1.0, 0.0, 3.0]), Loss(loss)
    expected, weighted = function(prediction, numbers.float()), function(prediction, numbers.float(), weight)
    for y in (numbers, numbers.bool(), numbers.byte(), numbers.double(), numbers.bfloat16()):
        for output, target in [(prediction, y), (prediction[:, None], y), (prediction, y[:, None])]:
            assert torch.equal(function(output, target), expected)
            assert torch.equal(function(output, target, weight), weighted)
    for output, target in [
        (prediction[:, None].expand(3, 2), numbers[:, None]),
        (prediction[None], numbers),
        (prediction, numbers[:1]),
    ]:
        with pytest.raises(BatchError, match="Expected targets of the output's shape"):
            function(output, target)


def test_classes_may_have_any_integer_dtype():
    logits, classes = torch.tensor([[0.2, 0.9], [0.6, 0.1]]), torch.tensor([0, 1])
    for loss in ("cross_entropy", nn.NLLLoss()):
        for kind in (torch.bool, torch.uint8, torch.int32):
            assert torch.equal(Loss(loss)(logits, classes.to(kind)), Loss(loss)(logits, classes))


@pytest.mark.soak_on(8)
@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"precision": "bf16"}], ids=["fp32", "eagerly", "bf16"])
@pytest.mark.parametrize(
    ("loss", "metric"), [("mse", "mae"), ("bce_with_logits", "accuracy"), ("huber_loss", "r2_score")]
)
def test_integer_targets_in_every_mode(cores, options, loss, metric):
    def values(y):
        torch.manual_seed(0)
        model = tpufit.Model(nn.Linear(3, 1))
        model.compile("sgd", loss, metrics=[metric], weighted_metrics=["mse"] if metric == "mae" else None, **options)
        size = {"batch_size": 24 // cores, "verbose": 0, "cores": cores}
        history = model.fit(PREDICTIONS, y, validation_data=(PREDICTIONS, y), **size).history
        evaluated = model.evaluate(PREDICTIONS, y, **size)
        on_batch = model.train_on_batch(PREDICTIONS, y), model.test_on_batch(PREDICTIONS, y)
        return np.hstack([*history.values(), evaluated, *on_batch])

    numbers = torch.arange(24) % 2
    expected = values(numbers[:, None].float())
    tolerance = 2e-3 if "precision" in options else 1e-6  # XLA omits rounding to bfloat16 where it can
    for y in (numbers, numbers.bool()[:, None]):
        np.testing.assert_allclose(values(y), expected, rtol=tolerance)


def test_weighted_rows_are_divided_by_their_number_as_in_keras():
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5])
    expected = (F.cross_entropy(LOGITS, CLASSES, reduction="none") * weights).sum() / 4
    for loss in ("cross_entropy", nn.CrossEntropyLoss(), lambda p, t: F.cross_entropy(p, t, reduction="none")):
        torch.testing.assert_close(Loss(loss)(LOGITS, CLASSES, weights), expected)


@pytest.mark.parametrize("module", [nn.KLDivLoss(reduction="batchmean"), nn.MSELoss(reduction="sum"), nn.MSELoss()])
def test_sample_weights_of_1_change_no_reduction(module):
    prediction, target = LOGITS.log_softmax(1), LOGITS.softmax(1)
    torch.testing.assert_close(Loss(module)(prediction, target, torch.ones(4)), module(prediction, target))


def test_the_users_loss_module_is_not_changed_by_weights():
    module = nn.CrossEntropyLoss()
    Loss(module)(LOGITS, CLASSES, torch.ones(4))
    assert module.reduction == "mean"


def test_weights_need_the_loss_of_each_row():
    with pytest.raises(ArgumentError, match="loss of each row"):
        Loss(lambda p, t: F.cross_entropy(p, t))(LOGITS, CLASSES, torch.ones(4))


def test_a_loss_that_isnt_a_tensor():
    with pytest.raises(ArgumentError, match="must return a tensor, got float"):
        Loss(lambda p, t: 1.0)(LOGITS, CLASSES)


@pytest.mark.parametrize(("label", "named"), [(3, "label 3"), (-1, "label -1"), (99, "label 99")])
def test_a_label_outside_the_classes(label, named):
    loss = Loss("cross_entropy")
    found = loss.label_range(torch.tensor([0, 1, label]))
    loss.check_labels(None, LOGITS)
    message = rf"{named} is outside the module's 3 classes \(0 to 2\), in a batch of targets of shape \(3,\), int64\."
    with pytest.raises(LabelError, match=message):
        loss.check_labels(found, LOGITS)
    with pytest.raises(
        LabelError, match=r"targets of shape \(1, 2\), uint8\."
    ):  # of a replayed step, with another shape
        loss.check_labels(loss.label_range(torch.tensor([[1, 7]], dtype=torch.uint8)))


def test_classes_in_the_last_dimension_are_named():
    loss = Loss("cross_entropy")
    message = (
        r"finds 5 classes in an output of shape \(2, 5, 9\), and label 8: PyTorch expects .* transposed, output.mT, or"
    )
    with pytest.raises(LabelError, match=message):
        loss.check_labels(loss.label_range(torch.arange(10).reshape(2, 5) % 9), torch.zeros(2, 5, 9))


def test_valid_labels():
    for loss, labels in [
        (Loss("cross_entropy"), [0, 2, -100]),  # PyTorch's default ignore_index
        (Loss(nn.CrossEntropyLoss(ignore_index=255)), [0, 2, 255]),
        (Loss("cross_entropy"), [-100, -100]),
    ]:
        loss.check_labels(loss.label_range(torch.tensor(labels)), LOGITS)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (256,), (257,), (7, 1), (40, 9)])
def test_label_bounds_are_found_in_batches_of_any_size(shape, dtype):
    """From a list for few labels, from an array for many."""
    loss = Loss(nn.CrossEntropyLoss(ignore_index=99))
    labels = torch.randint(2, 90, shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)
    found = loss.label_range(labels)
    assert found is not None and found[:2] == (labels.min().item(), labels.max().item())
    assert found[2:] == (labels.shape, dtype)
    ignored = torch.full_like(labels, 99)
    assert loss.label_range(ignored) is None
    assert loss.label_range(torch.stack([labels, ignored]).flatten())[:2] == found[:2]
    assert loss.label_range(labels.new_empty(0)) is None


def test_only_classes_are_checked():
    assert Loss("cross_entropy").label_range(LOGITS.softmax(1)) is None  # probabilities as targets
    assert Loss("mse_loss").label_range(torch.tensor([7])) is None
    assert Loss(lambda p, t: p.mean()).label_range(torch.tensor([7])) is None


def test_unknown_names():
    with pytest.raises(UnknownNameError, match="did you mean 'cross_entropy'"):
        Loss("crossentropy")
    with pytest.raises(UnknownNameError, match="In PyTorch that is 'cross_entropy'.*takes logits"):
        Loss("sparse_categorical_crossentropy")


@pytest.mark.parametrize("wrong", [nn.CrossEntropyLoss, 3, None])
def test_an_invalid_loss(wrong):
    with pytest.raises(ArgumentError, match="loss must be a name"):
        Loss(wrong)


def test_a_missing_loss_says_how_to_pass_one():
    with pytest.raises(NotCompiledError, match="fit needs a loss"):
        require_loss(None, "fit")


PREDICTIONS = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
TARGETS = {
    "cross_entropy": torch.arange(24) % 3,
    "nll_loss": torch.arange(24) % 3,
    "hinge_embedding_loss": torch.arange(72).reshape(24, 3) % 2 * 2.0 - 1,
    "soft_margin_loss": torch.arange(72).reshape(24, 3) % 2 * 2.0 - 1,
}
SHARES = torch.rand(24, 3, generator=torch.Generator().manual_seed(1))
TARGETS["mean_absolute_percentage_error"] = 40 + SHARES  # the loss takes percents


class Bias(nn.Module):
    """Adds to its input, and brings it into the range of the loss."""

    def __init__(self, last=None):
        super().__init__()
        self.bias, self.last = nn.Parameter(torch.zeros(3)), last or nn.Identity()

    def forward(self, x):
        return self.last(x + self.bias)


def model_for(loss):
    last = {"binary_cross_entropy": nn.Sigmoid(), "nll_loss": nn.LogSoftmax(1)}
    return Bias(last.get(loss) if isinstance(loss, str) else None)


@pytest.mark.cores(1, 8, timeout=300)
@pytest.mark.parametrize(
    "loss", [*{loss: name for name, loss in NAMES.items()}.values(), nn.HuberLoss(delta=0.3)], ids=str
)
def test_every_loss_equals_pytorchs_without_a_fallback(cores, loss):
    """torch_xla would compute Huber's loss on the host, with a wait in each step."""
    y = TARGETS.get(loss, SHARES) if isinstance(loss, str) else SHARES
    model = tpufit.Model(model_for(loss))
    model.compile(lambda p: torch.optim.SGD(p, 0.1), loss, scale_lr=None, jit_compile=True)
    before = runtime.counts()
    losses = model.fit(PREDICTIONS, y, 24 // cores, 3, verbose=0, shuffle=False, cores=cores).history["loss"]
    counts = runtime.counts() - before
    assert not counts.fallbacks and counts.host_reads == 0

    plain = model_for(loss)
    optimizer, function = torch.optim.SGD(plain.parameters(), 0.1), NAMES[loss] if isinstance(loss, str) else loss
    expected = plain_steps(plain, optimizer, function, [(PREDICTIONS, y)] * 3)
    assert losses == pytest.approx(expected, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(model.state_dict()["bias"], plain.bias.detach(), atol=1e-6, rtol=0)


@pytest.mark.cores(1)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("delta", [1.0, 0.25, 4.0])
def test_hubers_loss_equals_pytorchs(reduction, delta):
    tpufit.init(cores=1)
    x, results = PREDICTIONS * 3, []
    for device in ("cpu", driver().device_type):
        prediction, target = x.to(device).requires_grad_(), SHARES.to(device)
        value = F.huber_loss(prediction, target, reduction=reduction, delta=delta)
        (gradient,) = torch.autograd.grad(value.sum(), prediction)
        results.append((value.detach().cpu(), gradient.cpu()))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
    with pytest.raises(RuntimeError, match="non-positive values for delta"):
        F.huber_loss(prediction, target, delta=0)


@pytest.mark.cores(1)
@pytest.mark.parametrize("kernels", [replace_kernels, nullcontext], ids=["in a step", "outside"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_the_loss_of_one_sample_equals_pytorchs(kernels, weighted, reduction):
    tpufit.init(cores=1)
    for label in (2, -100):
        for name in ("cross_entropy", "nll_loss"):
            results = []
            for device in ("cpu", driver().device_type):
                scores = LOGITS[0].to(device).requires_grad_()
                weight = torch.tensor([1.0, 2.0, 3.0]).to(device) if weighted else None
                with kernels():
                    value = getattr(F, name)(scores, torch.tensor(label).to(device), weight, reduction=reduction)
                    (gradient,) = torch.autograd.grad(value, scores)
                results.append((value.detach().cpu(), gradient.cpu()))
            for one, other in zip(*results, strict=True):
                torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6, equal_nan=True)


@pytest.mark.cores(1)
@pytest.mark.parametrize("shapes", [((3,), (1,)), ((3,), (3,)), ((), ())], ids=str)
def test_labels_of_another_shape_than_one_sample_are_an_error(shapes):
    tpufit.init(cores=1)
    scores, labels = (
        torch.zeros(shapes[0]).to(driver().device_type),
        torch.zeros(shapes[1], dtype=torch.int64).to(driver().device_type),
    )
    for loss in (F.cross_entropy, F.nll_loss):
        with replace_kernels(), pytest.raises((RuntimeError, ValueError, IndexError)):
            loss(scores, labels)


@pytest.mark.cores(1)
def test_rolling_an_empty_tensor():
    tpufit.init(cores=1)
    assert torch.zeros(0, 3).to(driver().device_type).roll(1, 0).shape == (0, 3)
    assert torch.arange(3).to(driver().device_type).roll(1).tolist() == [2, 0, 1]
