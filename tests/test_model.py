"""`Model` where no device is needed: what compile accepts, what it answers to mistakes, and the summary."""

import inspect

import numpy as np
import pytest
import torch
from torch import nn

import tpufit
from tpufit.diagnostics.summary import table
from tpufit.errors import ArgumentError, UnknownNameError
from tpufit.step import precision


def model():
    return tpufit.Model(nn.Linear(2, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "adamm"}, "unknown optimizer 'adamm': did you mean"),
        ({"loss": "cross_entrophy"}, "unknown loss 'cross_entrophy': did you mean 'cross_entropy'"),
        ({"metrics": ["accurcy"]}, "unknown metric 'accurcy': did you mean 'accuracy'"),
        ({"precision": "bf61"}, "unknown precision 'bf61': did you mean 'bf16'"),
    ],
)
def test_unknown_names(arguments, message):
    with pytest.raises(UnknownNameError, match=message):
        model().compile(**({"optimizer": "adam", "loss": "mse"} | arguments))


@pytest.mark.parametrize("name", ["fp16", "float16", "16-mixed", "mixed_float16"])
def test_float16_is_answered_with_bfloat16(name):
    with pytest.raises(ArgumentError, match="no float16 arithmetic. Use precision='bf16'"):
        model().compile("adam", "mse", precision=name)


def test_autocast_is_bfloat16_or_off():
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with precision.autocast("bf16", torch.device("cpu")):
        assert layer(x).dtype is torch.bfloat16
    with precision.autocast("fp32", torch.device("cpu")):
        assert layer(x).dtype is torch.float32


def test_a_compile_that_fails_changes_nothing():
    trained = model()
    trained.compile("adam", "mse")
    optimizer = trained.optimizer
    with pytest.raises(UnknownNameError):
        trained.compile("sgd", "mse", metrics=["nothing"])
    assert trained.optimizer is optimizer


@pytest.mark.parametrize("scale", ["cubic", 8, True])
def test_unknown_scaling(scale):
    with pytest.raises(ArgumentError, match="scale_lr must be"):
        model().compile("adam", "mse", scale_lr=scale)


@pytest.mark.parametrize("wrong", [nn.Linear, 3, lambda x: x])
def test_only_modules_are_wrapped(wrong):
    with pytest.raises(ArgumentError, match=r"wraps a torch\.nn\.Module"):
        tpufit.Model(wrong)


def test_arguments_are_checked_before_a_device_is_started():
    trained = model()
    trained.compile("adam", "mse")
    x = torch.ones(4, 2)
    for arguments, message in [
        ({"epochs": 0}, "epochs must be"),
        ({"initial_epoch": -1}, "initial_epoch must be a whole number of at least 0, got -1"),
        ({"epochs": 1.5}, "epochs must be a whole number of at least 1, got 1.5"),
        ({"verbose": "loud"}, "verbose"),
        ({"cores": "many"}, "cores must be"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            trained.fit(x, x, **arguments)
    assert tpufit.runtime.settled() is None


def test_the_methods_have_keras_arguments():
    keras = {  # in Keras 3's order
        "fit": "x y batch_size epochs verbose callbacks validation_split validation_data shuffle class_weight "
        "sample_weight initial_epoch steps_per_epoch validation_steps validation_batch_size validation_freq",
        "evaluate": "x y batch_size verbose sample_weight steps callbacks return_dict",
        "predict": "x batch_size verbose steps callbacks",
        "train_on_batch": "x y sample_weight class_weight return_dict",
        "test_on_batch": "x y sample_weight return_dict",
        "compute_loss": "x y y_pred sample_weight training",
        "compute_metrics": "x y y_pred sample_weight",
        "get_metrics_result": "",
        "save_weights": "filepath",
        "load_weights": "filepath skip_mismatch",
    }
    for method, names in keras.items():
        ours = [name for name in inspect.signature(getattr(tpufit.Model, method)).parameters if name != "self"]
        assert ours[: len(names.split())] == names.split(), method


def test_which_way_a_log_gets_better():
    trained = model()
    trained.compile("adam", "mse", metrics=["accuracy", "mae"])
    assert trained.higher_is_better("val_accuracy") is True and trained.higher_is_better("mae") is False
    assert trained.higher_is_better("val_loss") is False and trained.higher_is_better("else") is None


def test_summary_counts_shared_and_frozen_parameters_once(capsys):
    net = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False), nn.Dropout())
    net[1].weight = net[0].weight
    net.append(nn.Linear(10, 2))
    net[3].weight.requires_grad_(False)
    text = table(net)
    assert [line.split() for line in text.splitlines()] == [
        ["layer", "type", "output", "parameters", "bytes", "dtype"],
        ["0", "Embedding", "?", "40", "160", "B", "float32"],
        ["1", "Linear", "?", "0", "float32", "weight", "is", "0.weight"],
        ["2", "Dropout", "?", "0"],
        ["3", "Linear", "?", "22", "88", "B", "float32", "weight", "frozen"],
        ["62", "parameters", "(248", "B),", "42", "of", "them", "trainable"],
    ]
    net[3].bias.requires_grad_(False)
    assert table(net).splitlines()[4].split()[-2:] == ["float32", "frozen"]
    tpufit.Model(net).summary()
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == (
        "memory per core: 408 B = 248 B weights + 160 B gradients + ? optimizer (known after a step); activations apart"
    )
    printed = []
    tpufit.Model(net).summary(print_fn=printed.append)
    assert f"{printed[0]}\n" == shown


def outputs(text):
    return [line.split()[2] for line in text.splitlines()[1:] if line.startswith(" ")]


def test_summary_knows_outputs_from_a_batch_and_leaves_the_model_as_it_was():
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 2)).train()
    before, random = {name: tensor.clone() for name, tensor in net.state_dict().items()}, torch.get_rng_state()
    printed = []
    trained = tpufit.Model(net)
    trained.summary(printed.append)
    trained.summary(printed.append, input_size=(5, 4))
    trained.summary(printed.append, x=np.zeros((3, 4), "float32"))
    trained.summary(printed.append)
    assert [outputs(text) for text in printed] == [["?"] * 4, ["5x6"] * 3 + ["5x2"], *[["3x6"] * 3 + ["3x2"]] * 2]
    assert net.training and all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and not net[0]._forward_hooks
