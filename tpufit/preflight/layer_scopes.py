"""`Scopes`: names the operations of a traced step by the user's layer and line.

A report can therefore say which layer takes the time, and which line makes the cores communicate.

torch_xla writes the scope of a traced operation into the program, and XLA preserves it. tpufit's scopes have the form
`~phase|layer|line~`; the innermost scope counts. (XLA drops what follows an `@`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..errors import PreflightError
from ..runtime import falls_back, find_cure, scope
from ..utils.user_code import LIBRARY_CODE, find_calling_lines

FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
_NAMED = "layer"  # a key in a node's metadata; a reference to the node itself would keep the step's tensors


class Scopes(TorchFunctionMode):
    """Names the operations of a traced step by the user's layer and line, and refuses operations that fall back."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}  # the user's lines, with their indices in scopes
        self._names = {id(part): name or type(part).__name__ for name, part in module.named_modules()}
        self._layers: list[str] = []  # the layers whose forward is running
        self._open: list[ExitStack] = []

    @contextmanager
    def naming(self) -> Iterator[None]:
        """A context in which the Python of steps is traced."""
        with ExitStack() as stack:
            for handle in (
                register_module_forward_pre_hook(self._enter_layer),
                # Always called, because `torch.utils.checkpoint` may end a block early by an exception.
                register_module_forward_hook(self._leave_layer, always_call=True),
                register_optimizer_step_pre_hook(lambda *_: self._layers.append("")),
                register_optimizer_step_post_hook(self._leave_optimizer),
            ):
                stack.callback(handle.remove)
            with self:
                yield

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name.startswith("__get"):  # an attribute, such as a shape
            return func(*args, **(kwargs or {}))
        line = find_calling_lines().removesuffix(LIBRARY_CODE)
        if falls_back(name) and any(leaf.device.type != "cpu" for leaf in _tensors((args, kwargs))):
            raise PreflightError(
                f"the step calls {name} at {line}, which would run on the host. {find_cure(f'aten::{name}')}"
            )
        with scope(self._name(FORWARD, line)):
            result = func(*args, **(kwargs or {}))
        self._name_backward((args, kwargs), result, line)
        return result

    def _name(self, phase: str, line: str) -> str:
        layer = self._layers[-1] if self._layers else "loss and metrics"
        return f"~{phase if layer else OPTIMIZER}|{layer}|{self.lines.setdefault(line, len(self.lines))}~"

    def _leave_optimizer(self, *_: Any) -> None:
        self._layers.pop()

    def _enter_layer(self, layer: nn.Module, inputs: Any) -> None:
        if id(layer) in self._names:
            self._layers.append(self._names[id(layer)])

    def _leave_layer(self, layer: nn.Module, inputs: Any, outputs: Any) -> None:
        if id(layer) in self._names:
            self._name_backward(inputs, outputs, "")  # for nodes that no function has named
            self._layers.pop()

    def _name_backward(self, inputs: Any, outputs: Any, line: str) -> None:
        """Name the nodes of the backward pass between inputs and outputs."""
        nodes = [leaf.grad_fn for leaf in _tensors(outputs)]
        if not any(nodes):
            return
        name = self._name(BACKWARD, line)
        stop = {leaf.grad_fn for leaf in _tensors(inputs)}
        while nodes:
            node = nodes.pop()
            if node is None or node in stop:
                continue
            metadata: Any = node.metadata  # a dict, though PyTorch's types call it a method
            if _NAMED in metadata:
                continue
            metadata[_NAMED] = name
            self._name_node(node, name)
            nodes += [following for following, _ in node.next_functions]

    def _name_node(self, node: Any, name: str) -> None:
        stack = ExitStack()

        def enter(*_: Any) -> None:
            stack.enter_context(scope(name))
            self._open.append(stack)

        def leave(*_: Any) -> None:
            # PyTorch forgets the first hook of a leaf that a checkpointed function has saved.
            if self._open and self._open[-1] is stack:
                self._open.pop().close()

        node.register_prehook(enter)
        node.register_hook(leave)


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]
