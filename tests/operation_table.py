"""Compares the operations of PyTorch's own table (OpInfo) on the device with the CPU, forward and backward.

    python tests/operation_table.py --dtype complex64 --samples 6 var linalg.inv_ex

prints a JSON line for each operation: its samples, and the distinct verdicts that aren't "right". `--modules` runs
PyTorch's table of modules (ModuleInfo) instead, in training and in evaluation. `--plain` runs torch_xla or TorchTPU
alone, without tpufit; `python docs/operations.py` compares both. `--order 2` adds second derivatives, of the squares of
the results, because many operations are linear. Each operation runs in a process of its own, because torch_xla may end
the process, and an error may make all later operations fail. Samples with random results are omitted, because no result
is right.
"""

import argparse
import importlib
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

Within = Callable[[], AbstractContextManager[object]]

WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128, torch.bfloat16: torch.float32}
# The largest difference |a - b| / (0.001 * max(1, largest |b|) + |b|) that is rounding.
ROUNDING = {torch.float32: 2e-3, torch.complex64: 2e-3, torch.bfloat16: 2e-3}
# The largest difference from the exact result, relative to its largest number: the device may round each step of an
# operation to bfloat16, where PyTorch rounds once, so that a few roundings add up; for a module, twice as many.
OF_STEPS = {torch.bfloat16: 4 * 2**-8}


@dataclass
class ModuleSample:
    """A call of a module, in the form of OpInfo's samples. The arguments are the module and its forward arguments."""

    input: dict[str, Tensor]  # the parameters and buffers
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output_process_fn_grad: None = None


@dataclass
class ModuleOperation:
    """A row of PyTorch's table of modules, in the form of OpInfo."""

    info: Any
    supports_autograd: bool = True

    @property
    def name(self) -> str:
        return str(self.info.name)

    formatted_name = name

    def supported_dtypes(self, device: str) -> tuple[torch.dtype, ...]:
        return (*self.info.dtypes, torch.bfloat16)  # which most modules of the table don't list, and take

    supported_backward_dtypes = supported_dtypes

    def sample_inputs(self, device: str, dtype: torch.dtype, requires_grad: bool) -> Iterator[ModuleSample]:
        for training in (True, False) if self.info.train_and_eval_differ else (True,):
            options = {"device": device, "dtype": dtype, "requires_grad": requires_grad, "training": training}
            for inputs in self.info.module_inputs_func(self.info, **options):
                made = inputs.constructor_input
                module = self.info.module_cls(*made.args, **made.kwargs).to(device, dtype).train(training)
                state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
                for name, parameter in module.named_parameters():
                    state[name].requires_grad_(parameter.requires_grad and requires_grad)
                yield ModuleSample(state, (module, *inputs.forward_input.args), inputs.forward_input.kwargs)

    @staticmethod
    def op(state: dict[str, Tensor], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the module with these parameters and buffers, and return its results and its new buffers."""
        results = torch.func.functional_call(module, state, args, kwargs)
        return results, [tensor for tensor in state.values() if not tensor.requires_grad]


def differentiate(outputs: Sequence[Tensor | None], inputs: list[Tensor], send: Any, order: int) -> list[Tensor | None]:
    """Return the gradients of a weighted sum of the outputs for each input, and their gradients, up to an order."""
    learning = [output for output in outputs if output is not None and output.requires_grad]
    gradients: Sequence[Tensor | None] = [None] * len(inputs)
    if learning and inputs:
        factors = [((torch.arange(o.numel()) % 7 + 1) / 7).reshape(o.shape).to(o.dtype) for o in learning]
        factors = [f if o.device.type == "cpu" else send(f) for f, o in zip(factors, learning, strict=True)]
        gradients = torch.autograd.grad(learning, inputs, factors, allow_unused=True, create_graph=order > 1)
    return [*gradients, *(differentiate(gradients, inputs, send, order - 1) if order > 1 else ())]


def compute(
    op: Any, sample: Any, send: Any, order: int, seed: int = 0, within: Within = nullcontext
) -> list[Tensor | None]:
    """Compute an operation's results and gradients on tensors that `send` makes of the sample's, and read them."""
    args, kwargs = tree_map_only(Tensor, send, ((sample.input, *sample.args), sample.kwargs))
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    torch.manual_seed(seed)
    with within():
        results = op.op(*args, **kwargs)
        if sample.output_process_fn_grad is not None:
            results = sample.output_process_fn_grad(results)
        outputs = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        inputs = [tensor for tensor in given if tensor.requires_grad]
        differentiated = [output.square() for output in outputs if output.requires_grad] if order > 1 else outputs
        gradients = differentiate(differentiated, inputs, send, order)
    numbers = [torch.tensor(leaf) for leaf in tree_leaves(results) if isinstance(leaf, (bool, int, float, complex))]
    return [None if one is None else one.detach().cpu() for one in (*outputs, *gradients, *numbers)]


def describe_difference(
    ours: list[Tensor | None],
    theirs: list[Tensor | None],
    rounding: float = 0.0,
    exact: list[Tensor | None] | None = None,
    of_steps: float = 0.0,
) -> str:
    """Describe the first difference that is more than rounding, or return "". `exact` has results in a wider dtype.

    Where PyTorch's results differ from the exact results, ours may differ ten times as much; where PyTorch's are NaN,
    as for exponentials of matrices in bfloat16, ours must be exact.
    """
    if len(ours) != len(theirs):
        return f"{len(ours)} results, not {len(theirs)}"
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one is None or other is None:
            known = one if other is None else other
            if known is not None and known.count_nonzero():
                return f"result {number} is missing on one side"
        elif (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"result {number} is {one.dtype} {tuple(one.shape)}, not {other.dtype} {tuple(other.shape)}"
        elif one.dtype.is_floating_point or one.dtype.is_complex:
            a, b = (torch.view_as_real(t.resolve_conj().to(torch.complex128)) for t in (one, other))
            truth = exact[number] if exact else other
            truth = other if truth is None or truth.shape != other.shape else truth
            c = torch.view_as_real(truth.resolve_conj().to(torch.complex128))
            b = torch.where(b.isnan() & c.isfinite(), c, b)
            scale, largest = (max([0.0, *x[x.isfinite()].abs().flatten().tolist()]) for x in (b, c))
            relative = (a - b).abs() / (1e-3 * max(scale, 1) + b.abs())
            relative[(a == b) | (a.isnan() & b.isnan())] = 0
            relative[c.isfinite() & ((a - c).abs() <= (10 * (b - c).abs()).clamp_min(of_steps * largest))] = 0
            if relative.numel() and not relative.max() <= rounding:
                return f"result {number} differs by {float(relative.max()):.2g}"
        elif not torch.equal(one, other):
            return f"result {number} differs"
    return ""


def judge(
    op: Any, dtype: torch.dtype, most: int, order: int, move: Callable[[Tensor], Tensor], within: Within
) -> Iterator[str]:
    """Yield the verdict of each sample that PyTorch accepts, up to `most`. An error ends the iteration.

    Derivatives up to `order` are compared. `move` copies a tensor to the device, and `within` returns the context in
    which operations run there.
    """

    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    def send(tensor: Tensor) -> Tensor:
        return move(copy(tensor).detach()).requires_grad_(tensor.requires_grad)

    def widen(tensor: Tensor) -> Tensor:
        wide = tensor.detach().to(WIDER.get(tensor.dtype, tensor.dtype)).clone()
        return wide.requires_grad_(tensor.requires_grad)

    torch.manual_seed(0)
    learns = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=learns))
    for sample in samples[:: -(-len(samples) // most)]:
        theirs = None
        exact = None
        with suppress(Exception):  # PyTorch refuses some samples
            theirs = compute(op, sample, copy, order)
        if theirs is None or any(one is not None and one.layout is not torch.strided for one in theirs):
            continue  # the device has no sparse tensors
        if any(describe_difference(compute(op, sample, copy, order, seed), theirs) for seed in (1, 2, 3)):
            continue
        if isinstance(op, ModuleOperation) and any(one is not None and one.isnan().any() for one in theirs):
            continue  # torch_xla's relu stops the gradient of NaN
        if dtype in WIDER:
            with suppress(Exception):
                exact = compute(op, sample, widen, order)
        try:
            ours = compute(op, sample, send, order, within=within)
        except Exception as error:
            yield f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
            return
        of_steps = OF_STEPS.get(dtype, 0.0) * (2 if isinstance(op, ModuleOperation) else 1)
        difference = describe_difference(ours, theirs, order * ROUNDING.get(dtype, 0.0), exact, of_steps)
        yield f"wrong: {difference}" if difference else "right"


def start(cores: int, plain: bool) -> tuple[Callable[[Tensor], Tensor], Within]:
    """Start the installed runtime, with tpufit's kernels or `plain`, and return what `judge` needs."""
    if plain:
        if find_spec("torch_xla"):
            device = importlib.import_module("torch_xla").device()
        else:
            importlib.import_module("torch_tpu._loader")._init_device("tpu")
            device = torch.device("tpu")
        return lambda tensor: tensor.to(device), nullcontext
    from tpufit import runtime
    from tpufit.runtime.ops.kernels import replace_kernels

    placement = runtime.make_placement(runtime.start(cores, "the table of operations"))
    return lambda tensor: placement.send([tensor])[0], replace_kernels


def judge_in_a_fork(op: Any, dtype: torch.dtype, most: int, order: int, cores: int, plain: bool) -> list[str]:
    """Return the verdicts of an operation that runs in a fork of this process, which must not have begun with XLA."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            for verdict in judge(op, dtype, most, order, *start(cores, plain)):
                os.write(writer, f"{verdict}\n".encode())
        except BaseException as error:
            reason = next(iter(str(error).splitlines()), "")
            os.write(writer, f"not judged: {type(error).__name__}: {reason}\n".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as said:
        verdicts = said.read().splitlines()
    _, status = os.waitpid(child, 0)
    return verdicts + ([f"ended by signal {os.WTERMSIG(status)}"] if os.WIFSIGNALED(status) else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="operations (default: all)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--samples", type=int, default=3, help="the most samples of an operation (default 3)")
    parser.add_argument("--order", type=int, default=1, help="the highest order of derivatives (default 1)")
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="the runtime alone, without tpufit")
    parser.add_argument("--modules", action="store_true", help="the table of modules, not of operations")
    parser.add_argument("--part", default="1/1", help="e.g. 3/10: the third tenth of the operations")
    given = parser.parse_args()
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(given.cores))
    # Imported once, before the forks.
    importlib.import_module("torch_xla" if find_spec("torch_xla") else "torch_tpu")
    from torch.testing._internal import common_methods_invocations, common_modules

    # Or random operations would seed themselves, and seem to have a right result.
    common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    dtype = getattr(torch, given.dtype)
    part, parts = map(int, given.part.split("/"))
    modules = [ModuleOperation(info) for info in common_modules.module_db if "Lazy" not in info.name]
    for op in modules if given.modules else common_methods_invocations.op_db:
        if "empty" in op.name:  # the values of its result are arbitrary
            continue
        chosen = not given.names or {op.name, op.formatted_name} & {*given.names}
        if chosen and dtype in op.supported_dtypes("cpu") and zlib.crc32(op.name.encode()) % parts == part - 1:
            verdicts = judge_in_a_fork(op, dtype, given.samples, given.order, given.cores, given.plain)
            faults = sorted(set(verdicts) - {"right"})
            print(json.dumps({"operation": op.formatted_name, "samples": len(verdicts), "faults": faults}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
