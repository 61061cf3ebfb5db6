"""Operations and their lowerings: torch_xla computes an operation that has none on the host."""

import torch
from torch import Tensor

_libraries: dict[str, torch.library.Library] = {}

# An operation has a kernel of the device, or is made of others that have.
_KEYS = ("XLA", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")


def has_kernel(operation: str) -> bool:
    """True if the device computes `"aten::add.Tensor"`, or another, itself; else the host does, with a wait a step."""
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(operation, key) for key in _KEYS)


def falls_back(name: str) -> bool:
    """True if the device computes no form of an operation.

    Example:
        >>> falls_back("add"), falls_back("dim"), falls_back("histc")
        (False, False, True)
    """
    packet = getattr(torch.ops.aten, name, None)
    forms = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else []
    forms = [getattr(packet, form).name() for form in forms]
    known = [form for form in forms if torch._C._dispatch_has_kernel(form)]  # others are of TorchScript only
    return bool(known) and not any(map(has_kernel, known))


def lower_missing(backend: str = "XLA") -> None:
    """Teach the device Huber's loss, for the name, `nn.HuberLoss` and `torch.nn.functional`.

    Of the losses that `compile` takes by name it is the only one without a lowering in torch_xla 2.9. Values and
    gradients are PyTorch's, but for rounding where `delta` is not 1. The backend is the dispatch key of the tensors;
    tests take `"CPU"`.
    """
    if backend not in _libraries:  # for good: taking a kernel back while another thread is in it would be a crash
        library = _libraries[backend] = torch.library.Library("aten", "IMPL")
        for key in (f"Autograd{backend}", backend):  # the latter for torch.inference_mode
            library.impl("huber_loss", _huber_loss, key)


def _huber_loss(input: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    if not delta > 0:
        raise RuntimeError("huber_loss does not support non-positive values for delta.")  # as PyTorch says it
    loss: Tensor = torch.ops.aten.smooth_l1_loss(input, target, reduction, beta=delta) * delta
    return loss
