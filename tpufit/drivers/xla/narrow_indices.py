"""`narrow_indices`: gathers and scatters get 32-bit indices where several cores share the work.

XLA's partitioner pads indices that can't be divided evenly with a 32-bit number, and crashes if the indices have 64
bits, on CPUs and TPUs. It may split any tensor of a step unevenly: half of an even batch is enough.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .release_differences import redispatch

# The operations with a kernel in torch_xla, and the position of their indices among the arguments.
_INDEXED = {
    "_index_put_impl_": 1,
    "embedding": 1,
    "embedding_dense_backward": 1,
    "gather": 2,
    "index.Tensor": 1,
    "index_add": 2,
    "index_add_": 2,
    "index_copy": 2,
    "index_copy_": 2,
    "index_fill_.int_Scalar": 2,
    "index_fill_.int_Tensor": 2,
    "index_put_": 1,
    "index_select": 2,
    "max_unpool2d": 1,
    "max_unpool3d": 1,
    "put_": 1,
    "scatter.reduce": 2,
    "scatter.src": 2,
    "scatter.value": 2,
    "scatter.value_reduce": 2,
    "scatter_.reduce": 2,
    "scatter_.src": 2,
    "scatter_.value": 2,
    "scatter_.value_reduce": 2,
    "scatter_add": 2,
    "scatter_add_": 2,
    "scatter_reduce.two": 2,
    "scatter_reduce_.two": 2,
    "take": 1,
}
_libraries: dict[str, torch.library.Library] = {}


def narrow_indices(backend: str = "XLA") -> None:
    """Give the device's kernels 32-bit indices, forward and backward, permanently. Results are the same."""
    if backend in _libraries:
        return
    # Permanent: removing a kernel while another thread runs it would crash.
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced
        for name, position in _INDEXED.items():
            key, native = redispatch(f"aten::{name}", backend)
            library.impl(name, _narrowing(name, position, native, backend.lower()), key, with_keyset=True)
    _libraries[backend] = library  # last, so that the next call retries after an error


def _narrowing(name: str, position: int, native: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Return a kernel that narrows indices and calls the native kernel."""
    wide = name.startswith(("index_copy", "index_fill"))  # torch_xla's kernels take only 64 bits

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if args[0].device.type == device and args[0].numel() < 2**31:
            indices = args[position]
            narrow: Any = [_narrow(i) for i in indices] if isinstance(indices, list | tuple) else _narrow(indices)
            if not wide:
                args = (*args[:position], narrow, *args[position + 1 :])
            elif narrow is not indices and indices.dim() and args[0].dim():
                return _put(name, args[0], args[1], narrow, args[3])
        return native(keys, *args, **kwargs)

    return kernel


def _narrow(index: Tensor | None) -> Tensor | None:
    if index is None or index.dtype is not torch.int64:
        return index
    # torch_xla computes the indices of max pooling and cummax in 32 bits, but believes that they have 64, and fails to
    # convert them. It can convert a product with them.
    return (index * 1).to(torch.int32)


def _put(name: str, tensor: Tensor, dim: int, index: Tensor, values: Any) -> Tensor:
    """Copy or fill rows by an operation that takes 32-bit indices."""
    places = [None] * (dim % tensor.dim()) + [index]
    put = torch.ops.aten.index_put_ if name.split(".")[0].endswith("_") else torch.ops.aten.index_put
    result: Tensor = put(tensor, places, values if isinstance(values, Tensor) else tensor.new_full((), values))
    return result
