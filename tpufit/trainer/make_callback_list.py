"""`make_callback_list`: the callbacks of a `fit`, an evaluation or a prediction, with a progress bar if one is due."""

from typing import Any

from ..callbacks import Callback, CallbackList
from ..step import Engine


def make_callback_list(engine: Engine, callbacks: Any, params: dict[str, Any], *added: Callback) -> CallbackList:
    """Return the user's callbacks, the `added` callbacks, and a progress bar if `verbose` needs one.

    A user's `CallbackList` gets no bar, as in Keras. Without `verbose` there is no bar: a silent bar costs time, too.
    """
    add_progbar = bool(params["verbose"]) and not isinstance(callbacks, CallbackList)
    # The engine's `UserModel` is the user's model, which has everything that callbacks may use.
    model: Any = engine.model
    all_callbacks = CallbackList([*CallbackList(callbacks), *added], False, add_progbar, model, **params)
    all_callbacks.expose = engine.expose
    all_callbacks.note_user_code = engine.note_user_code
    engine.note_user_code(every_batch=False)  # the user's program, which called `fit`
    return all_callbacks
