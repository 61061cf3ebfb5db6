"""`explain_slowness`: why a step is slow, and the change of the user's code that makes it fast.

A step is slow if it can't be replayed, so that its Python runs every time, or if it calls operations that run on the
host. `Watch` and `CapturedProgram` find the cause; `find_cure` finds the cure by words in the cause.
"""

# Cures, by words in the cause; the first entry that matches is used.
_CURES = {
    "aten::nonzero": "Instead of picking rows (x[mask], nonzero), keep all and weight them: torch.where(mask, x, 0)",
    "aten::_unique2": "The shape of its result varies: count with a one-hot product instead, or in a callback",
    "aten::equal": "Compare on the device: (a == b).all()",
    "aten::": "Replace it by other operations, or do it in the data set, or in a callback once per epoch",
    "torch/optim/": (
        "Take another optimizer; or if this one isn't an attribute of the model, let "
        "self.apply_gradients(loss, optimizer) take its step"
    ),
    "leaves gradients": (
        "Clear them before loss.backward(): self.module.zero_grad() also clears those of parameters that no optimizer "
        "has, unlike self.optimizer.zero_grad(). Or let compile(accumulate_steps=n) sum them"
    ),
    "it reads": "Return it from train_step as a log, choose with torch.where instead of if, or leave it out",
    "isn't a buffer": (
        "Register it as a buffer, which steps may change and checkpoints save: self.register_buffer(name, tensor) in "
        "the module, or in another module that the Model keeps"
    ),
    "share a part": "Keep a copy of one of the two: x.clone()",
    "draws": "Draw on the device (torch.rand(..., device=x.device)) or in the data set",
    "NumPy's global generator": "Draw on the device (torch.rand(..., device=x.device)) or in the data set",
    "jit_compile": "Leave jit_compile at 'auto'",
    "": "Keep counters in a buffer on the device, and don't let the step's Python read values that change",
}


def explain_slowness(role: str, cause: str, eagerly: bool) -> str:
    """Return a sentence about a step that is traced on every call or runs eagerly, with its cure.

    Example:
        >>> print(explain_slowness("train", "its Python draws random numbers at net.py:8", eagerly=False))
        the train step is traced again on every call, which is slow, because its Python draws random numbers at \
net.py:8. Draw on the device (torch.rand(..., device=x.device)) or in the data set
    """
    how = "runs operation by operation" if eagerly else "is traced again on every call"
    return f"the {role} step {how}, which is slow, because {cause}. {find_cure(cause)}"


def find_cure(cause: str) -> str:
    """Return the cure for what prevents a step from being replayed, as a sentence.

    The cause is a sentence, or the name of an operation that runs on the host.

    Example:
        >>> find_cure("aten::nonzero")
        'Instead of picking rows (x[mask], nonzero), keep all and weight them: torch.where(mask, x, 0)'
    """
    return next(cure for words, cure in _CURES.items() if words in cause)
