"""The differences between the supported releases of torch_xla. No other module asks which release is installed.

| | 2.8 | 2.9 |
| --- | --- | --- |
| a libtpu of a later release | may crash the process at its start | works |
| the text of an error | contains the C++ stack | is only the message |
| a runtime that doesn't start | crashes the process at its exit, and at the next call | raises an error each time |
| mismatched shapes in a matrix product, a stack or cross-entropy | crash the process | raise an error |
| a replaced kernel | is lost; ours runs before the device is chosen | can still be called |
| a number in place of a tensor | must be passed to the operation again | can be passed to the replaced kernel |
| the operations of a view | can only be applied, by one function | can be read and applied |
| a step that fails while it runs, e.g. out of memory | crashes the process when a result is read | raises an error |

tpufit can't cure the last difference: no function of 2.8 that reads or awaits a result reports the failure first. A
program that is too large for a TPU fails during compilation, which raises an error in both releases.

`matmul_precision` doesn't differ: both releases write it into each product of a program, and start with `"default"`,
for which a TPU computes a product in one pass of bfloat16.
"""

import atexit
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ...utils import releases
from ...utils.user_code import warn

_STACK = re.compile(r"\s*\*\*\* Begin stack trace \*\*\*.*?\*\*\* End stack trace \*\*\*\s*", re.DOTALL)

_PRODUCTS = ("addmm", "addmv", "baddbmm", "dot", "matmul", "mm", "mv")
# torch_xla copies seeds from the host while it holds a lock. If a kernel in Python ran then, so might the garbage
# collector, which waits for this lock forever to delete a tensor of the device.
_COPIES = ("aten::_local_scalar_dense", "aten::_to_copy", "aten::copy_")
_UNCHECKED = {F.cross_entropy, F.linear, F.nll_loss, torch.stack, Tensor.__matmul__}
_UNCHECKED |= {getattr(place, name) for place in (torch, Tensor) for name in _PRODUCTS}


def release() -> str:
    """Return the installed release, e.g. `"2.9"`.

    Raises:
        VersionError: torch and torch_xla aren't compatible, or aren't installed.
    """
    return releases.check_versions(*(releases.find_version(name) for name in ("torch", *releases.RUNTIMES)))


def warn_of_libtpu() -> None:
    """Warn before a TPU is started with a libtpu that may crash the process."""
    compiler = releases.find_compiler_versions()
    if release() == "2.8" and compiler["libtpu"] is not None and not releases.is_tested_libtpu(compiler):
        warn(
            f"torch_xla {compiler['torch_xla']} was released for libtpu 0.0.17, and later versions are known to crash "
            f"the process; libtpu {compiler['libtpu']} is installed. If the process crashes now: "
            f"{releases.make_install_command(compiler, 'libtpu')}"
        )


def remove_exit_handler(runtime: Any) -> None:
    """Remove torch_xla's exit handler after a failed start: it would start the runtime again, and crash."""
    if release() == "2.8":
        atexit.unregister(runtime._prepare_to_exit)


def extract_message(error: BaseException) -> str:
    """Return the text of an error from torch_xla without the C++ stack.

    Example:
        >>> error = RuntimeError("No client. *** Begin stack trace *** f() *** End stack trace *** Unknown device")
        >>> extract_message(error)
        'No client. Unknown device'
    """
    return _STACK.sub(" ", str(error)).strip()


def redispatch(operation: str, backend: str) -> tuple[str, Callable[..., Any]]:
    """Return the dispatch key for a kernel that replaces a device's kernel, and a function that calls the latter.

    The function takes the dispatcher's keys first. In 2.8 the new kernel gets the tensors of all devices, and numbers
    in place of tensors, as in `x % 3`; and the replaced kernel of a gradient is PyTorch's. Kernels that copy get only
    the tensors of the device, and none inside `torch.inference_mode`.
    """
    if release() != "2.8":
        return backend, torch.library.get_kernel(operation, backend).call_boxed
    if operation in _COPIES:
        backend = f"Autograd{backend}"
    name, _, overload = operation.removeprefix("aten::").partition(".")
    native = getattr(getattr(torch.ops.aten, name), overload or "default")
    keys = torch._C.DispatchKey
    if backend.startswith("Autograd"):
        # PyTorch also registers its gradients under a key for no specific device.
        below = torch._C._dispatch_keyset_full_after(keys.AutogradOther)
        others = torch._C.DispatchKeySet(keys.AutogradOther)
        return backend, lambda keyset, *args, **kwargs: native.redispatch(keyset & below | others, *args, **kwargs)
    return "BackendSelect", partial(_call_below_ours, native)


def _call_below_ours(native: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the kernel that ours replaced, also with a number in place of a tensor."""
    ours, host = torch._C.DispatchKey.BackendSelect, torch._C.DispatchKey.CPU
    arguments = zip(native._schema.arguments, args, strict=False)
    if not any(isinstance(value, Number) and isinstance(it.type, torch.TensorType) for it, value in arguments):
        return native.redispatch(keyset & torch._C._dispatch_keyset_full_after(ours), *args, **kwargs)
    if not any(isinstance(value, Tensor) for value in args):
        return native(torch.as_tensor(np.asarray(args[0])), *args[1:], **kwargs)
    # Only a whole call turns the number into a tensor with a number's dtype rules. Without the key of our kernel,
    # PyTorch doesn't choose the device of the tensors that the replaced kernel creates on the host.
    without_ours = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(ours))
    with without_ours, torch._C._IncludeDispatchKeyGuard(host):
        return native.overloadpacket(*args, **kwargs)


def apply_view(tensor: Tensor, view: Tensor) -> Tensor:
    """Apply the operations of a view on the device to a tensor other than its base."""
    result: Tensor
    if release() == "2.8":
        result = torch._functionalize_apply_view_metas(view, tensor)
    else:
        views = torch._C._functionalization
        result = views.apply_view_meta_sequence(tensor, views.get_view_meta_sequence(view))
    return result


def checking_shapes() -> AbstractContextManager[object]:
    """A context for the first trace of a step, in which mismatched shapes raise PyTorch's error."""
    if release() != "2.8":
        return nullcontext()
    return _CheckingShapes()


class _CheckingShapes(TorchFunctionMode):
    """Computes the shape of each result on the meta device first, because torch_xla crashes if shapes don't match."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _UNCHECKED:
            try:
                with torch._C._DisableTorchDispatch():  # otherwise a checkpoint's mode would keep this result
                    func(*tree_map(_shape, args), **tree_map(_shape, kwargs or {}))
            except AssertionError as error:  # from `stack`'s Python; elsewhere it is a RuntimeError
                raise RuntimeError(str(error)) from error
        return func(*args, **(kwargs or {}))


def _shape(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    # Autocast would give all operands one dtype.
    dtype = torch.float32 if leaf.is_floating_point() else leaf.dtype
    return torch.empty(leaf.shape, dtype=dtype, device="meta")
