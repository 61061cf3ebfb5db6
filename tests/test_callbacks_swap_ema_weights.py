"""SwapEMAWeights: when the averages are in place; the model's weight is 1 and its average is 2."""

import pytest
from fake_model import FakeModel

from tpufit.callbacks import Callback, CallbackList, EarlyStopping, ModelCheckpoint, SwapEMAWeights
from tpufit.checkpoint import read_weights

WEIGHT, AVERAGE = 1, 2


class Averaging(FakeModel):
    def __init__(self):
        super().__init__()
        self.weight = WEIGHT

    def swap_ema_weights(self, to=None):
        self.weight = AVERAGE if to else WEIGHT


class Seen(Callback):
    """Records which of the two are in place."""

    def __init__(self, *hooks):
        self.weights = []
        for hook in hooks:
            setattr(self, hook, lambda *args: self.weights.append(self.model.weight))


@pytest.mark.parametrize("what", ["test", "predict"])
def test_averages_are_swapped_in_and_out(what):
    model, seen = Averaging(), Seen(f"on_{what}_batch_begin", f"on_{what}_batch_end")
    hooks = CallbackList([SwapEMAWeights(), seen], model=model)
    hooks.call(f"on_{what}_begin")
    hooks.call(f"on_{what}_batch_begin", 0)
    hooks.call(f"on_{what}_batch_end", 0)
    hooks.call(f"on_{what}_end")
    assert (seen.weights, model.weight) == ([AVERAGE, AVERAGE], WEIGHT)


@pytest.mark.parametrize(
    ("swap_on_epoch", "first", "saved"),
    [(False, True, [WEIGHT] * 3), (True, True, [AVERAGE] * 3), (True, False, [WEIGHT] * 3)],
)
def test_a_later_checkpoint_saves_averages_if_asked(tmp_path, swap_on_epoch, first, saved):
    swap, checkpoint = SwapEMAWeights(swap_on_epoch), ModelCheckpoint(tmp_path / "{epoch}.safetensors")
    model, trained = Averaging(), Seen("on_train_batch_begin")
    hooks = CallbackList([trained, *([swap, checkpoint] if first else [checkpoint, swap])], model=model)
    hooks.call("on_train_begin")
    for epoch in range(3):
        hooks.call("on_epoch_begin", epoch)
        hooks.call("on_train_batch_begin", 0)
        hooks.call("on_test_begin")
        hooks.call("on_test_end")
        hooks.call("on_epoch_end", epoch)
    assert [float(read_weights(path)["weight"]) for path in model.saved] == saved
    assert trained.weights == [WEIGHT] * 3


@pytest.mark.parametrize(
    ("swap_on_epoch", "first", "warned"), [(False, True, True), (True, True, False), (True, False, True)]
)
def test_early_stopping_warns_if_it_judges_averages_but_restores_weights(swap_on_epoch, first, warned, recwarn):
    swap, stopping = SwapEMAWeights(swap_on_epoch), EarlyStopping(restore_best_weights=True)
    hooks = CallbackList([swap, stopping] if first else [stopping, swap], model=Averaging())
    hooks.call("on_train_begin")
    assert [str(one.message)[:43] for one in recwarn] == ["EarlyStopping(restore_best_weights=True) ch"] * warned


@pytest.mark.parametrize("stopping", [EarlyStopping(), EarlyStopping("loss", restore_best_weights=True)])
def test_other_early_stopping_is_not_warned_of(stopping, recwarn):
    CallbackList([SwapEMAWeights(), stopping], model=Averaging()).call("on_train_begin")
    assert not recwarn
