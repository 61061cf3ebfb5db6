"""`Model` where no device is needed: what compile accepts, what it answers to mistakes, and the summary."""

import inspect

import pytest
import torch
from torch import nn

import tpufit
from tpufit import precision
from tpufit.errors import ArgumentError, UnknownNameError
from tpufit.summary import table


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
    lines = {line.split()[0]: line.split() for line in text.splitlines()[1:-1]}
    assert lines["0"][1:4] == ["Embedding", "40", "10x4"] and lines["1"][1:3] == ["Linear", "0"]
    assert lines["3"][1:5] == ["Linear", "22", "2x10,", "2"]
    assert text.splitlines()[-1] == "62 parameters (248 B), 42 of them trainable"
    tpufit.Model(net).summary()
    assert capsys.readouterr().out.strip() == text.strip()
    printed = []
    tpufit.Model(net).summary(print_fn=printed.append)
    assert printed == [text]
