"""What differs between the releases of torch_xla that tpufit works with. Nothing else asks which of them is installed.

| | 2.8 | 2.9 |
| --- | --- | --- |
| a libtpu of a later release | may end the process as it starts | works |
| an error's text | has the C++ stack in it | is words only |
| a runtime that doesn't start | ends the process at its exit, and at the next call | an error, each time |
| shapes that don't fit in a matrix product, a stack or a loss of classes | end the process | an error |
| a kernel that is replaced | is gone, and ours goes before the choice of a device | can be called |
| the operations that made a view | one function applies them | can be read, and applied |
| a step that fails while it runs, as for want of memory | ends the process when a result is read | an error |

The last can't be mended from outside: of all that reads a result or waits for it, nothing in 2.8 tells of a failure
before. A program that is too large for a TPU fails as it is compiled, which is an error on both.

`matmul_precision` is no difference: both releases write it into each product of a program, and begin with `"default"`,
which a TPU computes in one pass of bfloat16.
"""

import atexit
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ..utils import releases
from ..utils.users_code import warn

_STACK = re.compile(r"\s*\*\*\* Begin stack trace \*\*\*.*?\*\*\* End stack trace \*\*\*\s*", re.DOTALL)

_PRODUCTS = ("addmm", "addmv", "baddbmm", "dot", "matmul", "mm", "mv")
_UNCHECKED = {F.cross_entropy, F.linear, F.nll_loss, torch.stack, Tensor.__matmul__}
_UNCHECKED |= {getattr(place, name) for place in (torch, Tensor) for name in _PRODUCTS}


def release() -> str:
    """The installed release, e.g. `"2.9"`.

    Raises:
        VersionError: torch and torch_xla don't belong together.
    """
    return releases.check_versions(releases.version("torch"), releases.version("torch_xla"))


def warn_of_libtpu() -> None:
    """Warn before a TPU is started with a libtpu that may end the process."""
    found = releases.compiler()
    if release() == "2.8" and found["libtpu"] is not None and not releases.tried_libtpu(found):
        warn(
            f"torch_xla {found['torch_xla']} was released for libtpu 0.0.17, and later ones are known to end the "
            f"process; here is {found['libtpu']}. If that happens now: {releases.command(found, 'libtpu')}"
        )


def survive(runtime: Any) -> None:
    """Keep a process alive whose runtime hasn't started: leave out torch_xla's own end, which would start it again."""
    if release() == "2.8":
        atexit.unregister(runtime._prepare_to_exit)


def message_of(error: BaseException) -> str:
    """The text of an error of torch_xla's without the C++ stack in it.

    Example:
        >>> message_of(RuntimeError("No client. *** Begin stack trace *** f() *** End stack trace *** Unknown device"))
        'No client. Unknown device'
    """
    return _STACK.sub(" ", str(error)).strip()


def beneath(operation: str, backend: str) -> tuple[str, Callable[..., Any]]:
    """The dispatch key for a kernel that goes before a device's own, and how it calls that one: with its key set first.

    In 2.8 the kernel gets the tensors of all devices.
    """
    if release() != "2.8":
        return backend, torch.library.get_kernel(operation, backend).call_boxed
    name, _, overload = operation.removeprefix("aten::").partition(".")
    native = getattr(getattr(torch.ops.aten, name), overload or "default")
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    return "BackendSelect", lambda keys, *args, **kwargs: native.redispatch(keys & below, *args, **kwargs)


def viewed(tensor: Tensor, view: Tensor) -> Tensor:
    """Apply the operations that made a view on the device to another tensor than its base."""
    result: Tensor
    if release() == "2.8":
        result = torch._functionalize_apply_view_metas(view, tensor)
    else:
        views = torch._C._functionalization
        result = views.apply_view_meta_sequence(tensor, views.get_view_meta_sequence(view))
    return result


def checking_shapes() -> AbstractContextManager[object]:
    """A context for the first trace of a step, in which shapes that don't fit are PyTorch's own error."""
    if release() != "2.8":
        return nullcontext()
    return _CheckingShapes()


class _CheckingShapes(TorchFunctionMode):
    """Computes the shape of a result on the meta device before torch_xla does, which ends the process if it can't."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _UNCHECKED:
            try:
                with torch._C._DisableTorchDispatch():  # a checkpoint's mode would keep this result too
                    func(*tree_map(_shape, args), **tree_map(_shape, kwargs or {}))
            except AssertionError as error:  # of `stack` in Python; elsewhere it is a RuntimeError
                raise RuntimeError(str(error)) from error
        return func(*args, **(kwargs or {}))


def _shape(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    # Autocast would give all operands one dtype.
    dtype = torch.float32 if leaf.is_floating_point() else leaf.dtype
    return torch.empty(leaf.shape, dtype=dtype, device="meta")
