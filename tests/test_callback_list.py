"""The order of callbacks' hooks, the cost of unused hooks, and errors in callbacks."""

import pytest
from fake_model import FakeModel

from tpufit.callbacks import Callback, CallbackList, History, ProgbarLogger
from tpufit.errors import ArgumentError, CallbackError

INDEXED = ["on_epoch_begin", "on_epoch_end"] + [
    f"on_{what}_batch_{when}" for what in ("train", "test", "predict") for when in ("begin", "end")
]
PLAIN = [f"on_{what}_{when}" for what in ("train", "test", "predict") for when in ("begin", "end")]


def listed(*callbacks, **params):
    return CallbackList(list(callbacks), model=FakeModel(), **params)


def recorder(name, hooks, calls):
    """A callback whose hooks record (name, hook, arguments)."""

    def note(hook):
        return lambda self, *args: calls.append((name, hook, *args))

    return type(name, (Callback,), {hook: note(hook) for hook in hooks})()


class Raising(Callback):
    def __init__(self, hook, error):
        setattr(self, hook, self._raise)
        self.error = error

    def _raise(self, *args):
        raise self.error


def test_every_hook_reaches_every_callback_in_order():
    calls = []
    hooks = listed(*(recorder(name, INDEXED + PLAIN, calls) for name in ("First", "Second")))
    expected = []
    for hook in PLAIN:
        hooks.call(hook)
        expected += [("First", hook, {}), ("Second", hook, {})]
    for hook in INDEXED:
        hooks.call(hook, 7, {"loss": 0.5})
        expected += [("First", hook, 7, {"loss": 0.5}), ("Second", hook, 7, {"loss": 0.5})]
    assert calls == expected


def test_omitted_logs_are_empty():
    calls = []
    listed(recorder("C", ["on_epoch_begin", "on_train_begin"], calls)).call("on_epoch_begin", 3)
    assert calls == [("C", "on_epoch_begin", 3, {})]


def test_only_overridden_hooks_count():
    hooks = listed(Callback(), recorder("C", ["on_epoch_end"], []))
    assert hooks.has("on_epoch_end")
    assert [hook for hook in INDEXED + PLAIN if hooks.has(hook)] == ["on_epoch_end"]


def test_the_defaults_are_never_called(monkeypatch):
    for hook in INDEXED + PLAIN:
        monkeypatch.setattr(Callback, hook, lambda *args, hook=hook: pytest.fail(f"{hook} was called"))
    hooks = listed(Callback(), Callback())
    for hook in PLAIN:
        hooks.call(hook)
    for hook in INDEXED:
        hooks.call(hook, 0)


def test_on_batch_is_an_alias_of_on_train_batch():
    calls = []
    hooks = listed(recorder("C", ["on_batch_begin", "on_batch_end"], calls))
    assert hooks.has("on_train_batch_begin")
    hooks.call("on_train_batch_begin", 1)
    hooks.call("on_train_batch_end", 1, {"loss": 2.0})
    assert calls == [("C", "on_batch_begin", 1, {}), ("C", "on_batch_end", 1, {"loss": 2.0})]


def test_super_of_on_train_batch_end_calls_on_batch_end():
    calls = []

    class Both(Callback):
        def on_train_batch_end(self, batch, logs=None):
            calls.append("train")
            super().on_train_batch_end(batch, logs)

        def on_batch_end(self, batch, logs=None):
            calls.append("batch")

    listed(Both()).call("on_train_batch_end", 0)
    assert calls == ["train", "batch"]


def test_a_hook_may_be_an_instance_attribute():
    calls = []
    callback = Callback()
    callback.on_epoch_end = lambda epoch, logs: calls.append((epoch, logs))
    hooks = listed(callback)
    hooks.call("on_epoch_end", 4, {"loss": 1.0})
    assert calls == [(4, {"loss": 1.0})]
    assert not hooks.has("on_epoch_begin")


def test_an_inherited_override_counts():
    class Parent(Callback):
        def on_test_end(self, logs=None): ...

    class Child(Parent): ...

    assert listed(Child()).has("on_test_end")


def test_an_object_of_another_class_is_accepted():
    class Foreign:
        calls = []

        def on_batch_end(self, batch, logs):
            self.calls.append(batch)

    hooks = listed(Foreign())
    hooks.call("on_train_batch_end", 5, {})
    hooks.call("on_train_begin")
    assert Foreign.calls == [5]


def test_model_and_params_come_before_any_hook():
    seen = []

    class Looking(Callback):
        def on_train_begin(self, logs=None):
            seen.append((self.model, self.params))

    model, params = FakeModel(), {"epochs": 2, "steps": None, "verbose": 0}
    CallbackList(Looking(), model=model, **params).call("on_train_begin")
    assert seen == [(model, params)]


def test_none_one_or_several_callbacks():
    one = Callback()
    assert list(CallbackList(None, model=FakeModel())) == []
    assert list(CallbackList(one, model=FakeModel())) == [one]
    assert list(CallbackList((one, one), model=FakeModel())) == [one, one]
    assert len(CallbackList([one], model=FakeModel())) == 1
    assert CallbackList([one, CallbackList([one, (one,)])]).callbacks == [one, one, one]


def test_a_callback_list_has_all_hooks():
    calls = []
    hooks = listed(recorder("C", [*INDEXED, *PLAIN, "on_save", "on_exception"], calls))
    for hook in PLAIN:
        getattr(hooks, hook)()
    for hook in INDEXED:
        getattr(hooks, hook)(7, logs={"loss": 0.5})
    hooks.on_epoch_end(8, None)
    hooks.on_batch_end(9, {})
    expected = [("C", hook, {}) for hook in PLAIN] + [("C", hook, 7, {"loss": 0.5}) for hook in INDEXED]
    assert calls == [*expected, ("C", "on_epoch_end", 8, {}), ("C", "on_train_batch_end", 9, {})]
    assert all(name in vars(CallbackList) for name in dir(Callback) if name.startswith("on_"))


def test_a_callback_that_is_added_later_gets_the_same_calls():
    class Told(Callback):
        def __init__(self):
            self.told = []

        def set_params(self, params):
            self.told.append(params)

        def set_model(self, model):
            self.told.append(model)

        def on_epoch_end(self, epoch, logs=None):
            self.told.append(epoch)

    first, second, model = Told(), Told(), FakeModel()
    hooks = CallbackList(first, False, False, model, epochs=3)
    hooks.append(second)
    hooks.on_epoch_end(5)
    assert first.told == second.told == [{"epochs": 3}, model, 5]
    assert CallbackList(first).model is None and first.told[3:] == []  # no arguments
    later = CallbackList([second])
    later.set_params({"epochs": 1})
    later.set_model(model)
    assert second.told[3:] == [{"epochs": 1}, model] and (later.model, later.params) == (model, {"epochs": 1})
    with pytest.raises(ArgumentError, match="got 3 of type int"):
        hooks.append(3)


def test_missing_history_and_progress_bar_are_added():
    kinds = [type(one) for one in CallbackList(Callback(), add_history=True, add_progbar=True)]
    assert kinds == [Callback, History, ProgbarLogger]
    own = [ProgbarLogger(), History()]
    assert CallbackList(own, True, True).callbacks == own


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Callback, r"the class Callback: pass an instance, Callback\(\.\.\.\)"),
        ("early_stopping", "got 'early_stopping' of type str"),
        (None, "got None of type NoneType"),
        (len, "builtin_function_or_method"),
    ],
)
def test_an_object_without_hooks_is_refused_first(wrong, message):
    class Untouched(Callback):
        def set_model(self, model):
            pytest.fail("set_model ran")

    with pytest.raises(ArgumentError, match=message):
        listed(Untouched(), wrong)


def test_an_error_names_the_callback_and_the_hook():
    cause = ValueError("too small")
    with pytest.raises(CallbackError, match=r"^Raising\.on_epoch_end raised ValueError: too small$") as caught:
        listed(Raising("on_epoch_end", cause)).call("on_epoch_end", 0)
    assert caught.value.__cause__ is cause


def test_an_error_in_set_model_is_named_too():
    with pytest.raises(CallbackError, match=r"Raising\.set_model raised KeyError"):
        listed(Raising("set_model", KeyError("x")))


@pytest.mark.soak
def test_optunas_pruning_is_not_an_error():
    optuna = pytest.importorskip("optuna")

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    hooks = listed(Raising("on_epoch_end", optuna.TrialPruned("behind")))
    study = optuna.create_study()
    study.optimize(lambda trial: hooks.call("on_epoch_end", 0), n_trials=1)
    assert study.trials[0].state.name == "PRUNED"


def test_callbacks_after_a_failed_callback_are_not_called():
    calls = []
    hooks = listed(Raising("on_epoch_end", ValueError()), recorder("After", ["on_epoch_end"], calls))
    with pytest.raises(CallbackError):
        hooks.call("on_epoch_end", 0)
    assert calls == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(2)])
def test_exceptions_that_end_the_program_pass_unchanged(error):
    with pytest.raises(type(error)) as caught:
        listed(Raising("on_train_batch_end", error)).call("on_train_batch_end", 0)
    assert caught.value is error


def ends(hooks, error):
    try:
        raise error
    except BaseException as caught:
        hooks.close_after_error(caught)


def test_after_an_error_the_other_callbacks_end():
    calls = []

    class Faulty(Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise ValueError

        def on_train_end(self, logs=None):
            calls.append("Faulty")

    names = ("Before", "After")
    before, after = (recorder(name, ["on_train_end"], calls) for name in names)
    hooks = listed(before, Faulty(), after)
    hooks.call("on_train_begin")
    with pytest.raises(CallbackError) as caught:
        hooks.call("on_epoch_end", 0)
    hooks.close_after_error(caught.value)
    assert calls == [(name, "on_train_end", {}) for name in names]
    hooks.close_after_error(caught.value)
    assert len(calls) == 2  # once only


def test_after_an_error_in_the_loop_all_callbacks_end():
    calls = []
    hooks = listed(*(recorder(name, ["on_train_end"], calls) for name in "AB"))
    hooks.call("on_train_begin")
    ends(hooks, KeyboardInterrupt())
    assert [name for name, *_ in calls] == ["A", "B"]


def test_a_handled_error_is_forgotten():
    calls = []
    callback = Raising("on_epoch_end", ValueError())
    callback.on_train_end = lambda logs: calls.append("ended")
    hooks = listed(callback)
    hooks.call("on_train_begin")
    with pytest.raises(CallbackError):
        hooks.call("on_epoch_end", 0)
    ends(hooks, KeyboardInterrupt())
    assert calls == ["ended"]


def test_an_interrupt_in_a_callback_is_not_its_error():
    calls = []
    callback = Raising("on_train_batch_end", KeyboardInterrupt())
    callback.on_train_end = lambda logs: calls.append("ended")
    hooks = listed(callback)
    hooks.call("on_train_begin")
    with pytest.raises(KeyboardInterrupt) as caught:
        hooks.call("on_train_batch_end", 0)
    hooks.close_after_error(caught.value)
    assert calls == ["ended"]


def test_end_hooks_only_follow_begin_hooks():
    calls = []
    hooks = listed(recorder("C", ["on_train_end", "on_test_end", "on_predict_end"], calls))
    ends(hooks, ValueError())
    assert calls == []
    hooks.call("on_train_begin")
    hooks.call("on_train_end")
    calls.clear()
    ends(hooks, ValueError())
    assert calls == []


@pytest.mark.parametrize("what", ["test", "predict"])
def test_outside_of_fit_test_end_or_predict_end_is_called(what):
    calls = []
    hooks = listed(recorder("C", ["on_train_end", "on_test_end", "on_predict_end"], calls))
    hooks.call(f"on_{what}_begin")
    ends(hooks, ValueError())
    assert calls == [("C", f"on_{what}_end", {})]


@pytest.mark.parametrize("validated", [False, True])
def test_an_error_in_or_after_validation_ends_training(validated):
    calls = []
    hooks = listed(recorder("C", ["on_train_end", "on_test_end"], calls))
    hooks.call("on_train_begin")
    hooks.call("on_test_begin")
    if validated:
        hooks.call("on_test_end", {"loss": 1.0})
        calls.clear()
    ends(hooks, ValueError())
    assert calls == [("C", "on_train_end", {})]


def test_an_error_while_ending_is_a_warning():
    calls = []
    hooks = listed(Raising("on_train_end", OSError("disk full")), recorder("After", ["on_train_end"], calls))
    hooks.call("on_train_begin")
    with pytest.warns(UserWarning, match=r"Raising\.on_train_end raised OSError: disk full"):
        ends(hooks, ValueError())
    assert len(calls) == 1


def test_the_first_error_comes_first_if_warnings_are_errors():
    hooks = listed(Raising("on_train_end", OSError()))
    hooks.call("on_train_begin")
    ends(hooks, ValueError())  # pytest turns warnings into errors, so it would be raised here


def test_if_an_end_hook_raises_the_others_end_once():
    calls = []
    first = recorder("Before", ["on_train_end"], calls)
    hooks = listed(first, Raising("on_train_end", ValueError("no")), recorder("After", ["on_train_end"], calls))
    hooks.call("on_train_begin")
    with pytest.raises(CallbackError, match="no") as caught:
        hooks.call("on_train_end", {"loss": 1.0})
    hooks.close_after_error(caught.value)
    assert [(name, logs) for name, _, logs in calls] == [("Before", {"loss": 1.0}), ("After", {})]


def test_hooks_with_other_libraries_names_are_named():
    class Foreign(Callback):
        def on_train_epoch_end(self, trainer, pl_module): ...

        def on_fit_start(self, trainer, pl_module): ...

    class Helping(Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.on_train_epoch_end()

        def on_train_epoch_end(self): ...

    with pytest.warns(UserWarning, match=r"on_train_epoch_end \(use on_epoch_end\), on_fit_start \(use on_train_begin"):
        listed(Foreign())
    listed(Helping())  # which calls it itself


def test_a_callback_of_lightning_is_refused():
    class Theirs:
        def on_train_end(self, trainer, pl_module): ...

    Theirs.__module__ = "lightning.pytorch.callbacks.callback"
    with pytest.raises(ArgumentError, match="Theirs is a callback of lightning.*tpufit.callbacks.Callback"):
        listed(Theirs())
