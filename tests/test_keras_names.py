"""Keras's names of metrics: each equals Keras's definition, or the error names a replacement."""

import re

import pytest
import sklearn.metrics
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

import tpufit
from tpufit import metrics
from tpufit.backend import HOST
from tpufit.errors import ArgumentError, UnknownNameError
from tpufit.losses import NAMES, Loss
from tpufit.losses import keras_names as of_losses
from tpufit.metrics import PassMetrics
from tpufit.metrics.keras_names import NEAREST
from tpufit.optimizers import build
from tpufit.optimizers import keras_names as of_optimizers

torch.manual_seed(0)
P, T = torch.randn(23, 3), torch.randn(23, 3)
SCORES, LABELS = torch.randn(23, 9), torch.arange(23) % 9
MASKS = torch.randn(6, 1, 4, 5), (torch.rand(6, 1, 4, 5) > 0.6).float()


def run(name, y_pred, y, ignored=None, weight=None):
    built = metrics.build(None if weight is not None else [name], [name] if weight is not None else None, None, ignored)
    running = PassMetrics(built, HOST)
    half = len(y) // 2
    for part in (slice(0, half), slice(half, None)):
        running.begin()
        running.update_metrics(y_pred[part], y[part], None if weight is None else weight[part])
        running.count(len(y[part]), running.kept)
    return next(iter(running.results("test").values()))


def of_top(k):
    return (SCORES.topk(k).indices == LABELS[:, None]).any(1).float().mean().item()


# Keras's formulas; see keras/src/losses/losses.py and keras/src/metrics.
REGRESSION = {
    "rmse": (P - T).pow(2).mean().sqrt(),
    "root_mean_squared_error": (P - T).pow(2).mean().sqrt(),
    "mape": 100 * ((T - P) / T.abs().clamp(min=1e-7)).abs().mean(),
    "mean_absolute_percentage_error": 100 * ((T - P) / T.abs().clamp(min=1e-7)).abs().mean(),
    "msle": (T.clamp(min=1e-7).add(1).log() - P.clamp(min=1e-7).add(1).log()).pow(2).mean(),
    "mean_squared_logarithmic_error": (T.clamp(min=1e-7).add(1).log() - P.clamp(min=1e-7).add(1).log()).pow(2).mean(),
    "log_cosh": (P - T).double().cosh().log().mean(),
    "log_cosh_error": (P - T).double().cosh().log().mean(),
    "cosine_similarity": (P * T).sum(1).div(P.norm(dim=1) * T.norm(dim=1)).mean(),
}


@pytest.mark.parametrize("name", REGRESSION)
def test_regression_metrics_have_keras_values(name):
    assert run(name, P, T) == pytest.approx(REGRESSION[name].item(), rel=1e-5)


def test_large_errors_and_single_numbers():
    assert run("log_cosh", torch.full((4,), 1e4), torch.zeros(4)) == pytest.approx(1e4, rel=1e-3)  # cosh overflows
    assert run("cosine_similarity", torch.tensor([1.0, -2.0, 3.0]), torch.ones(3)) == pytest.approx(1 / 3)
    assert run("mape", torch.ones(2), torch.tensor([2.0, 2.0])) == 50.0


def test_weighted_metrics_equal_kerass_formulas():
    weight = torch.arange(23.0)
    expected = 100 * (((T - P) / T).abs().mean(1) * weight).sum() / weight.sum()
    assert run("mape", P, T, weight=weight) == pytest.approx(expected.item(), rel=1e-5)
    in_top = (SCORES.topk(5).indices == LABELS[:, None]).any(1).float()
    expected = (in_top * weight).sum() / weight.sum()
    assert run("sparse_top_k_categorical_accuracy", SCORES, LABELS, weight=weight) == pytest.approx(expected.item())


def test_accuracies_have_keras_values():
    one_hot = F.one_hot(LABELS, 9)
    right = (SCORES.argmax(1) == LABELS).float().mean().item()
    assert run("sparse_categorical_accuracy", SCORES, LABELS) == pytest.approx(right)
    assert run("categorical_accuracy", SCORES, one_hot) == run("categorical_accuracy", SCORES, one_hot.float())
    assert run("categorical_accuracy", SCORES, one_hot) == pytest.approx(
        right
    )  # without a loss that determines the task
    several = (torch.rand(23, 9) > 0.5).float()
    expected = ((SCORES > 0) == several.bool()).float().mean().item()
    assert run("binary_accuracy", SCORES, several) == pytest.approx(expected)
    expected = ((MASKS[0] > 0) == MASKS[1].bool()).float().mean().item()
    assert run("binary_accuracy", *MASKS) == pytest.approx(expected)
    assert run("sparse_top_k_categorical_accuracy", SCORES, LABELS) == pytest.approx(of_top(5))
    assert run("top_k_categorical_accuracy", SCORES, one_hot.float()) == pytest.approx(of_top(5))


def test_ignored_labels_arent_in_top_k():
    some = LABELS.clone()
    some[::3] = -100
    kept = some >= 0
    expected = (SCORES[kept].topk(5).indices == some[kept][:, None]).any(1).float().mean().item()
    ours = run("sparse_top_k_categorical_accuracy", SCORES, some, ignored={None: -100})
    assert ours == pytest.approx(expected) != pytest.approx(of_top(5))
    matrix = run("confusion_matrix", SCORES, some, ignored={None: -100})
    assert matrix.tolist() == sklearn.metrics.confusion_matrix(some[kept], SCORES[kept].argmax(1)).tolist()


def test_a_label_that_ties_with_others_is_in_the_top_as_in_keras():
    assert run("sparse_top_k_categorical_accuracy", torch.zeros(4, 9), torch.arange(4)) == 1.0


def test_areas_and_intersections():
    binary = torch.arange(23) % 2
    ours = run("auc", SCORES[:, 0], binary)
    assert (
        ours == pytest.approx(sklearn.metrics.roc_auc_score(binary, SCORES[:, 0])) == run("auroc", SCORES[:, 0], binary)
    )
    theirs = torchmetrics.JaccardIndex(task="multiclass", num_classes=9)
    for name in ("mean_iou", "mean_io_u"):
        assert run(name, SCORES, LABELS) == pytest.approx(theirs(SCORES, LABELS).item())
    few = LABELS % 4  # classes 4 to 8 occur only in predictions, and 8 never if it never wins
    scores = SCORES.index_fill(1, torch.tensor([8]), -9)
    assert run("mean_iou", scores, few) == pytest.approx(theirs(scores, few).item())
    of_two = sklearn.metrics.jaccard_score(MASKS[1].flatten(), MASKS[0].flatten() > 0, average=None).mean()
    assert run("mean_iou", *MASKS) == pytest.approx(of_two)


def test_confusion_matrices():
    theirs = sklearn.metrics.confusion_matrix
    assert run("confusion_matrix", SCORES, LABELS).tolist() == theirs(LABELS, SCORES.argmax(1)).tolist()
    binary = SCORES[:, :1], (LABELS % 2)[:, None]
    assert run("confusion_matrix", *binary).tolist() == theirs(binary[1][:, 0], SCORES[:, 0] > 0).tolist()


@pytest.mark.parametrize(
    ("name", "y_pred", "y", "says"),
    [
        ("categorical_accuracy", SCORES, LABELS, r"takes one-hot targets.*target of shape \(11,\)"),
        ("sparse_categorical_accuracy", SCORES, F.one_hot(LABELS, 9), r"integer targets \(batch, ...\), got"),
        ("binary_accuracy", SCORES, LABELS, "targets of one shape, each target 0 or 1"),
        ("mean_iou", SCORES, torch.ones(23, 2), "can't tell its task"),
    ],
)
def test_targets_of_the_wrong_kind(name, y_pred, y, says):
    with pytest.raises(ArgumentError, match=says):
        run(name, y_pred, y)


# The metrics of Keras 3.12 by name, but the bases; each class has its name in snake case, too.
KERAS = """
    accuracy acc auc bce binary_accuracy binary_crossentropy binary_io_u categorical_accuracy categorical_crossentropy
    categorical_hinge concordance_correlation cosine_similarity crossentropy f1_score false_negatives false_positives
    fbeta_score hinge io_u kl_divergence log_cosh_error mae mape mean_absolute_error mean_absolute_percentage_error
    mean_io_u mean_squared_error mean_squared_logarithmic_error mse msle one_hot_io_u one_hot_mean_io_u
    pearson_correlation poisson precision precision_at_recall r2_score recall recall_at_precision
    root_mean_squared_error sensitivity_at_specificity sparse_categorical_accuracy sparse_categorical_crossentropy
    sparse_top_k_categorical_accuracy specificity_at_sensitivity squared_hinge top_k_categorical_accuracy
    true_negatives true_positives
"""


def test_every_keras_metric_exists_or_has_a_hint():
    from tpufit.metrics.metric_names import NAMES

    assert [name for name in KERAS.split() if (name in NAMES) == (name in NEAREST)] == []
    assert NEAREST.keys() <= {*KERAS.split(), "mean", "mean_metric_wrapper", "sum"}
    with pytest.raises(UnknownNameError, match="unknown metric 'hinge': Pass torchmetrics.HingeLoss.task='binary'"):
        metrics.build(["hinge"])
    with pytest.raises(UnknownNameError, match="did you mean 'mse'"):
        metrics.build(["msee"])


def test_the_names_in_hints_exist():
    """Each torchmetrics class and each function, called as the sentence says."""
    rates, counts = P.exp(), T.exp().round()
    shares = T.softmax(1)
    poisson = run(lambda p, y: F.poisson_nll_loss(p, y, log_input=False, reduction="none"), rates, counts)
    assert poisson == pytest.approx((rates - counts * (rates + 1e-7).log()).mean().item(), rel=1e-4)
    kl = run(lambda p, y: F.kl_div(p.log_softmax(1), y, reduction="none").sum(1), P, shares)
    assert kl == pytest.approx((shares * (shares / P.softmax(1)).log()).sum(1).mean().item(), rel=1e-4)
    assert run(F.cross_entropy, SCORES, LABELS) == pytest.approx(F.cross_entropy(SCORES, LABELS).item(), rel=1e-5)
    named = {word.partition("(")[0].strip(".;:,") for said in NEAREST.values() for word in said.split()}
    own = {word.removeprefix("torchmetrics.") for word in named if word.startswith("torchmetrics.")}
    assert own and [name for name in own if not hasattr(torchmetrics, name)] == []


@pytest.mark.cores(1, 8)
def test_keras_metrics_are_computed_on_the_device(cores):
    """Uneven rows, in a replayed step, and sums on the device: no value is read, and no batch kept."""
    names = ["top_k_categorical_accuracy", "categorical_accuracy", "mean_iou", "confusion_matrix"]
    model = tpufit.Model(nn.Identity())
    model.compile(None, "cross_entropy", metrics=names, jit_compile=True)
    one_hot = F.one_hot(LABELS, 9).float()
    rows = {"batch_size": 8 // cores, "cores": cores, "verbose": 0, "return_dict": True}
    logs = model.evaluate(SCORES, one_hot, **rows)
    assert logs["categorical_accuracy"] == pytest.approx((SCORES.argmax(1) == LABELS).float().mean().item())
    assert logs["top_k_categorical_accuracy"] == pytest.approx(of_top(5))
    assert logs["mean_iou"] == pytest.approx(run("mean_iou", SCORES, LABELS))
    assert logs["confusion_matrix"].tolist() == run("confusion_matrix", SCORES, LABELS).tolist()
    model.compile(None, "mse", metrics=["mape", "msle", "log_cosh", "cosine_similarity", "rmse"], jit_compile=True)
    logs = model.evaluate(P, T, **rows)
    assert {name: logs[name] for name in logs if name in REGRESSION} == pytest.approx(
        {name: REGRESSION[name].item() for name in logs if name in REGRESSION}, rel=1e-4
    )
    model.compile(None, "bce_with_logits", metrics=["binary_accuracy", "mean_iou"], jit_compile=True)
    logs = model.evaluate(*MASKS, batch_size=1, cores=cores, verbose=0, return_dict=True)
    assert (logs["binary_accuracy"], logs["mean_iou"]) == pytest.approx(
        (run("binary_accuracy", *MASKS), run("mean_iou", *MASKS))
    )


# Keras 3's losses and optimizers by name, except base classes.
KERAS_LOSSES = """
    bce binary_crossentropy binary_focal_crossentropy categorical_crossentropy categorical_focal_crossentropy
    categorical_generalized_cross_entropy categorical_hinge circle cosine_similarity ctc dice hinge huber kl_divergence
    kld log_cosh mae mape mean_absolute_error mean_absolute_percentage_error mean_squared_error
    mean_squared_logarithmic_error mse msle poisson sparse_categorical_crossentropy squared_hinge tversky
"""
KERAS_OPTIMIZERS = """
    adadelta adafactor adagrad adam adamax adamw ftrl lamb lion loss_scale_optimizer multi_optimizer muon nadam rmsprop
    schedule_free_adam_w sgd
"""


def test_every_keras_loss_and_optimizer_exists_or_has_a_hint():
    from tpufit.optimizers import NAMES as OPTIMIZERS

    for known, answered, keras in (
        (NAMES, of_losses.NEAREST, KERAS_LOSSES),
        (OPTIMIZERS, of_optimizers.NEAREST, KERAS_OPTIMIZERS),
    ):
        names = {*keras.split()} - {"muon"}  # since PyTorch 2.9
        assert [name for name in names if (name in known) == (name in answered)] == []
        assert answered.keys() <= names
    with pytest.raises(UnknownNameError, match="unknown loss 'Dice': Pass a function of logits: lambda p, y: 1 - 2"):
        Loss("Dice")
    with pytest.raises(UnknownNameError, match="unknown optimizer 'Lion': .*timm.optim.Lion"):
        build("Lion", nn.Linear(2, 1))


@pytest.mark.parametrize("name", ["mape", "msle", "log_cosh"])
def test_regression_losses_equal_kerass(name):
    assert Loss(name)(P, T).item() == pytest.approx(REGRESSION[name].item(), rel=1e-5)
    weight = torch.arange(23.0)
    each = torch.stack([Loss(name)(p[None], t[None]) for p, t in zip(P, T, strict=True)])
    assert Loss(name)(P, T, weight).item() == pytest.approx((each * weight).mean().item(), rel=1e-5)


SIGNS = T.sign()
ONE_HOT = F.one_hot(LABELS, 9).float()
PROBABILITIES = SCORES.softmax(1)
BITS = (T > 0).float()
OF_LABEL = PROBABILITIES[torch.arange(23), LABELS]
# Keras's formulas, with probabilities where Keras takes them: see keras/src/losses/losses.py.
WRITTEN = {
    "categorical_focal_crossentropy": (SCORES, LABELS, -0.25 * (1 - OF_LABEL) ** 2 * OF_LABEL.log()),
    "categorical_generalized_cross_entropy": (SCORES, LABELS, (1 - OF_LABEL.sqrt()) / 0.5),
    "categorical_hinge": (
        SCORES,
        ONE_HOT,
        (((1 - ONE_HOT) * SCORES).amax(1) - SCORES[torch.arange(23), LABELS] + 1).relu(),
    ),
    "cosine_similarity": (P, T, -(F.normalize(P, dim=1) * F.normalize(T, dim=1)).sum(1)),
    "hinge": (P, SIGNS, (1 - P * SIGNS).relu()),
    "squared_hinge": (P, SIGNS, (1 - P * SIGNS).relu().square()),
    "dice": (P, BITS, 1 - 2 * (P.sigmoid() * BITS).sum(1) / (P.sigmoid().sum(1) + BITS.sum(1))),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_functions_in_hints_equal_kerass_losses(name):
    written = re.search(r"lambda p, y: .*?(?=, with |, and |\. |\.$)", of_losses.NEAREST[name])
    function = eval(written[0], {"F": F})
    y_pred, y, expected = WRITTEN[name]
    torch.testing.assert_close(function(y_pred, y), expected)
    assert Loss(function)(y_pred, y).item() == pytest.approx(expected.mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Hinge", "hinge"),
        ("KLDivergence", "kl_divergence"),
        ("BinaryIoU", "binary_io_u"),
        ("FBetaScore", "fbeta_score"),
    ],
)
def test_a_keras_metric_class_has_a_hint(name, known):
    model = tpufit.Model(torch.nn.Linear(3, 1))
    with pytest.raises(UnknownNameError) as error:
        model.compile(loss="mse", metrics=[name])
        model.evaluate(torch.ones(4, 3), torch.ones(4, 1), verbose=0)
    assert NEAREST[known] in str(error.value)


def test_class_names_are_aliases():
    names = ["MeanSquaredError", "AUC", "F1Score", "SparseTopKCategoricalAccuracy", "MAE", "r2_score"]
    known = ["mean_squared_error", "auc", "f1_score", "sparse_top_k_categorical_accuracy", "mae", "r2_score"]
    assert [metric.name for metric in metrics.build(names)] == known
    for name, plain in (
        ("CrossEntropyLoss", "cross_entropy"),
        ("BCEWithLogitsLoss", "bce_with_logits"),
        ("MSE", "mse"),
        ("LogCosh", "log_cosh"),
    ):
        target = torch.tensor([1, 0]) if name == "CrossEntropyLoss" else torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        assert Loss(name)(torch.eye(2), target) == Loss(plain)(torch.eye(2), target)
    assert Loss("CrossEntropyLoss").ignored == {None: -100}
