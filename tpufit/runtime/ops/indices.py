"""`narrow_indices`: operations that pick or place elements get indices of 32 bits, where several cores share the work.

XLA's partitioner pads indices that the cores can't share evenly with a number of 32 bits, and ends the process if the
indices have 64, on a CPU as on a TPU. It may split any tensor of a step unevenly: half of an even batch is enough.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..release import beneath

# Those with a kernel in torch_xla, and the positions of their indices.
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
    """Give the device's kernels indices of 32 bits, forward and backward, for good. Results are the same."""
    if backend in _libraries:
        return
    # For good: taking a kernel back while another thread is in it would be a crash.
    library = _libraries[backend] = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that a kernel is replaced
        for name, position in _INDEXED.items():
            key, native = beneath(f"aten::{name}", backend)
            library.impl(name, _narrowed(name, position, native, backend.lower()), key, with_keyset=True)


def _narrowed(name: str, position: int, native: Callable[..., Any], device: str) -> Callable[..., Any]:
    wide = name.startswith(("index_copy", "index_fill"))  # the kernels of torch_xla take 64 bits only

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
    # torch_xla computes the indices of a max pooling or a cummax in 32 bits, but takes them for 64 and can't convert
    # them. It converts a product with them.
    return (index * 1).to(torch.int32)


def _put(name: str, tensor: Tensor, dim: int, index: Tensor, values: Any) -> Tensor:
    """Copy or fill rows by an operation that takes indices of 32 bits."""
    places = [None] * (dim % tensor.dim()) + [index]
    put = torch.ops.aten.index_put_ if name.split(".")[0].endswith("_") else torch.ops.aten.index_put
    result: Tensor = put(tensor, places, values if isinstance(values, Tensor) else tensor.new_full((), values))
    return result
