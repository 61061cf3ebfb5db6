"""`Model` without a device: arguments of compile, errors, and the summary."""

import copy
import inspect
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import tpufit
from tpufit.diagnostics.summary import format_table
from tpufit.errors import ArgumentError, NotCompiledError, NotPicklableError, UnknownNameError
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
        ({"epochs": -1}, "epochs must be a whole number of at least 0, got -1"),
        ({"initial_epoch": -1}, "initial_epoch must be a whole number of at least 0, got -1"),
        ({"epochs": 1.5}, "epochs must be a whole number of at least 0, got 1.5"),
        ({"verbose": "loud"}, "verbose"),
        ({"cores": "many"}, "cores must be"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            trained.fit(x, x, **arguments)
    assert tpufit.runtime.get_settled_cores() is None


def test_the_methods_have_keras_arguments():
    keras = {  # in Keras 3's order; `auto_scale_loss`, the last argument of `compile`, is for float16
        "compile": "optimizer loss loss_weights metrics weighted_metrics run_eagerly steps_per_execution jit_compile",
        "test_on_batch": "x y sample_weight return_dict",
        "predict_on_batch": "x",
        "fit": "x y batch_size epochs verbose callbacks validation_split validation_data shuffle class_weight "
        "sample_weight initial_epoch steps_per_epoch validation_steps validation_batch_size validation_freq",
        "evaluate": "x y batch_size verbose sample_weight steps callbacks return_dict",
        "predict": "x batch_size verbose steps callbacks",
        "train_on_batch": "x y sample_weight class_weight return_dict",
        "compute_loss": "x y y_pred sample_weight training",
        "compute_metrics": "x y y_pred sample_weight",
        "get_metrics_result": "",
        "save_weights": "filepath",
        "load_weights": "filepath skip_mismatch",
    }
    for method, names in keras.items():
        _, *ours = inspect.signature(getattr(tpufit.Model, method)).parameters.values()
        by_place = [argument.name for argument in ours if argument.kind is argument.POSITIONAL_OR_KEYWORD]
        assert by_place == names.split(), method
    assert inspect.signature(tpufit.Model.compile).parameters["optimizer"].default == "adamw"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda made: made.compile("sgd", "mse", lr_schedule="cosine"), r"LRScheduler\('cosine', warmup=0.05\)"),
        (
            lambda made: made.compile("sgd", "mse", warmup=0.1),
            "compile\\(\\) has no argument 'warmup': a schedule is a",
        ),
        (
            lambda made: made.fit([1.0], [1.0], lr_scheduler="linear"),
            r"fit\(\) has no argument 'lr_scheduler': a schedule",
        ),
        (lambda made: made.compile("adamw", "mse", auto_scale_loss=True), "bfloat16 has the range of float32"),
        (lambda made: made.compile("sgd", "mse", learn="x"), "got an unexpected keyword argument 'learn'"),
    ],
)
def test_an_argument_of_another_library_has_a_hint(call, message):
    with pytest.raises(TypeError, match=message):
        call(model())


def test_metrics_in_place_of_loss_weights_are_refused():
    with pytest.raises(ArgumentError, match=r"If these are metrics: compile\(..., metrics=\['accuracy'\]\)"):
        model().compile("sgd", "cross_entropy", ["accuracy"])


def test_options_of_compile_can_be_read_and_set():
    made = model()
    assert (made.run_eagerly, made.steps_per_execution, made.jit_compile, made.loss) == (False, 1, "auto", None)
    made.run_eagerly = True
    with pytest.raises(NotCompiledError):  # still
        made.fit([1.0], [1.0])
    made.compile(loss="mse", steps_per_execution=4, jit_compile=False)
    assert (made.run_eagerly, made.steps_per_execution, made.jit_compile, made.loss) == (False, 4, False, "mse")
    assert isinstance(made.optimizer, torch.optim.AdamW) and made.learning_rate == 0.001
    made.run_eagerly, made.steps_per_execution, made.jit_compile = True, "auto", True
    assert (made.run_eagerly, made.steps_per_execution, made.jit_compile) == (True, "auto", True)
    for name, value in (("steps_per_execution", 0), ("jit_compile", "yes")):
        with pytest.raises(ArgumentError, match=f"{name} must be"):
            setattr(made, name, value)
    assert (made.steps_per_execution, made.jit_compile) == ("auto", True)


def test_a_changed_option_of_compile_is_saved(tmp_path):
    made = model()
    made.compile("sgd", "mse")
    made.steps_per_execution = 3
    made.save(tmp_path / "m")
    assert tpufit.load(tmp_path / "m", model().module).steps_per_execution == 3


@pytest.mark.parametrize("options", [{}, {"use_ema": True}, {"accumulate_steps": 2}])
def test_a_model_that_was_never_fitted_is_saved_and_loaded(tmp_path, options):
    made = model()
    made.compile("adamw", "mse", **options)
    made.save(tmp_path / "m")
    again = tpufit.load(tmp_path / "m", model().module)
    assert all(map(torch.equal, again.module.parameters(), made.module.parameters()))


def test_a_subclass_may_have_an_attribute_named_loss():
    class Attribute(tpufit.Model):
        def __init__(self, module):
            super().__init__(module)
            self.loss = "mine"

    class Method(tpufit.Model):
        def loss(self, y_pred, y):
            return "mine"

    attribute, method = Attribute(nn.Linear(2, 2)), Method(nn.Linear(2, 2))
    attribute.compile("sgd")
    method.compile("sgd")
    assert attribute.loss == method.loss(0, 0) == "mine"
    attribute.compile("sgd", "mse")  # Keras's `compile` sets it too
    assert attribute.loss == "mse" and attribute.loss_weights is None
    attribute.compile("sgd", {"a": "mse"}, {"a": 2.0})
    assert attribute.loss == {"a": "mse"} and attribute.loss_weights == {"a": 2.0}


def test_a_subclass_may_have_a_base_that_takes_arguments_of_the_class():
    class Registered:
        def __init_subclass__(cls, name, **kwargs):
            super().__init_subclass__(**kwargs)
            cls.name = name

    class Own(tpufit.Model, Registered, name="own"):
        pass

    assert Own(nn.Linear(2, 3)).name == "own"


def test_the_direction_of_each_log():
    trained = model()
    trained.compile("adam", "mse", metrics=["accuracy", "mae"])
    assert trained.higher_is_better("val_accuracy") is True and trained.higher_is_better("mae") is False
    assert trained.higher_is_better("val_loss") is False and trained.higher_is_better("else") is None


def test_summary_counts_shared_and_frozen_parameters_once(capsys):
    net = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False), nn.Dropout())
    net[1].weight = net[0].weight
    net.append(nn.Linear(10, 2))
    net[3].weight.requires_grad_(False)
    text = format_table(net)
    assert [line.split() for line in text.splitlines()] == [
        ["layer", "type", "output", "parameters", "bytes", "dtype"],
        ["0", "Embedding", "?", "40", "160", "B", "float32"],
        ["1", "Linear", "?", "0", "float32", "weight", "is", "0.weight"],
        ["2", "Dropout", "?", "0"],
        ["3", "Linear", "?", "22", "88", "B", "float32", "weight", "frozen"],
        ["62", "parameters", "(248", "B),", "42", "of", "them", "trainable"],
    ]
    net[3].bias.requires_grad_(False)
    assert format_table(net).splitlines()[4].split()[-2:] == ["float32", "frozen"]
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


def test_summary_of_a_batch_doesnt_change_the_model():
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


def test_the_package_has_dir_and_help(run_python):
    result = run_python("import tpufit; print(*dir(tpufit)); help(tpufit); help(tpufit.Model)")
    names = result.stdout.splitlines()[0].split()
    assert {*tpufit.__all__, "callbacks", "data", "errors"} <= set(names) and "__main__" not in names
    shown = result.stdout
    assert "class Model(" in shown and " |  fit(" in shown and "set_random_seed(" in shown and not result.stderr


def test_a_models_parameters_are_its_modules():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    trained = tpufit.Model(net)
    assert [id(p) for p in trained.parameters()] == [id(p) for p in net.parameters()]
    assert dict(trained.named_parameters("net")).keys() == {f"net.{name}" for name, _ in net.named_parameters()}
    assert trained.count_params() == 9 + 6
    net.append(net[0])
    assert trained.count_params() == 9 + 6


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("to", r"model\.to_cpu\(\)"),
        ("train", r"model\(x, training=False\)"),
        ("half", r"precision='bf16'"),
        ("layers", r"model\.module\.children\(\)"),
        ("trainable_weights", r"requires_grad\]"),
        ("get_config", "built by your own code, and model.save keeps its state"),
        ("make_train_function", "override train_step"),
        ("zero_grad", r"model\.apply_gradients\(loss\)"),
        ("modules", r"isn't an nn\.Module, but has one: use model\.module\.modules$"),
        ("register_forward_hook", r"model\.module\.register_forward_hook$"),
        ("fitt", "^'Model' object has no attribute 'fitt'$"),
    ],
)
def test_habits_of_pytorch_and_keras_have_a_hint(name, said):
    with pytest.raises(AttributeError, match=said):
        getattr(model(), name)
    assert not hasattr(model(), name) and name not in dir(model())


def test_names_of_habits_are_free_for_users():
    class Own(tpufit.Model):
        step = 3

        def __init__(self):
            super().__init__(nn.Linear(2, 2))
            self.layers = [1]

        def train(self):
            return "mine"

        @property
        def weights(self):
            return self.nothing

    own = Own()
    assert (own.step, own.layers, own.train()) == (3, [1], "mine")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        own.weights  # noqa: B018


@pytest.mark.parametrize("store", [pickle.dumps, copy.deepcopy, copy.copy, lambda it: torch.save(it, io.BytesIO())])
def test_a_model_is_saved_and_not_pickled(store):
    with pytest.raises(NotPicklableError, match=r"a Model can't be pickled or copied: use model\.save\(path\)"):
        store(model())


class Rebuilt(tpufit.Model):
    def __reduce__(self):
        return Rebuilt, (self.module,)


def test_a_subclass_may_define_its_pickling():
    assert pickle.loads(pickle.dumps(Rebuilt(nn.Linear(2, 2)))).count_params() == 6


@pytest.mark.parametrize("several", [["adam", "sgd"], (torch.optim.SGD,), {"g": "adam", "d": "sgd"}])
def test_several_optimizers_refer_to_the_gan_example(several):
    with pytest.raises(ArgumentError) as error:
        model().compile(several, "mse")
    first, second = str(error.value).splitlines()
    assert f"got {len(several)} optimizer" in first and "self.apply_gradients(loss, self." in second


def test_a_models_repr():
    trained = model()
    assert repr(trained) == "Model(Linear, 9 parameters, not compiled, 0 steps taken)"
    trained.compile("adamw", "mse")
    assert repr(trained) == "Model(Linear, 9 parameters, compiled with AdamW, 0 steps taken)"
    assert "Model object at" in repr(tpufit.Model.__new__(tpufit.Model))


# PyTorch's compiler imports modules that PyTorch has deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_module_is_unwrapped():
    net = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="torch.compile has no effect here") as caught:
        assert tpufit.Model(torch.compile(net)).module is net
    assert [one.filename for one in caught if one.category is UserWarning] == [__file__]


def compiled_in_place(net):
    net.compile()
    return net


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.jit.script(nn.Linear(2, 2)), "the module was made by torch.jit"),
        (lambda: nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))), "the layer '0' was made by torch"),
        (
            lambda: torch.export.export(nn.Linear(2, 2), (torch.ones(4, 2),)).module(),
            "the module was made by torch.export, which fixes its mode and its batch size: pass the original",
        ),
        (lambda: nn.Sequential(torch.compile(nn.Linear(2, 2))), "the layer '0' was compiled by torch.compile"),
        (lambda: compiled_in_place(nn.Linear(2, 2)), "the module was compiled by torch.compile"),
    ],
)
def test_modules_that_cant_be_traced_are_refused(make, said):
    with pytest.raises(ArgumentError, match=said):
        tpufit.Model(make())


def test_methods_with_lightnings_names_have_a_hint():
    class Lightning(tpufit.Model):
        def training_step(self, batch, index): ...

        def configure_optimizers(self): ...

        def on_train_epoch_end(self): ...

    class Calling(tpufit.Model):
        def train_step(self, batch):
            return self.training_step(batch, 0)

        def training_step(self, batch, index): ...

    class Numbered(tpufit.Model):
        def test_step(self, batch, batch_idx): ...

    with pytest.warns(UserWarning) as warned:
        Lightning(nn.Linear(2, 3))
    assert "training_step (use train_step(self, batch)), configure_optimizers (use compile(" in str(warned[0].message)
    assert "on_train_epoch_end (use a Callback with on_epoch_end)" in str(warned[0].message)
    Calling(nn.Linear(2, 3))
    with pytest.raises(ArgumentError, match=r"Numbered.test_step must take \(self, batch\)"):
        Numbered(nn.Linear(2, 3))


@pytest.mark.parametrize(
    ("name", "meant"),
    [("bf16-mixed", "'bf16'"), ("mixed_bfloat16", "'bf16'"), ("bfloat16", "'bf16-true'"), ("32-true", "'fp32'")],
)
def test_precisions_by_other_libraries_names(name, meant):
    with pytest.raises(ArgumentError, match=f"got '{name}': write {meant} instead"):
        model().compile("adam", "mse", precision=name)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("w.pkl", r"a path ending in '.safetensors', got 'w.pkl'"),
        ("run", r"got the folder 'run'\. If model.save .* wrote it, call tpufit.load\('run', net\)"),
    ],
)
def test_weights_in_other_files(path, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    with pytest.raises(ArgumentError, match=says):
        model().load_weights(path)
