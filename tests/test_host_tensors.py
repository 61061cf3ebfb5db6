"""Tensors on the host: tpufit's start leaves PyTorch's operations on them unchanged."""

import pytest

# PyTorch passes numbers to kernels in Python as they are; kernels of the device must pass them on as numbers.
COMPUTE = """
import itertools, torch

OPERATIONS = {
    "%": lambda x, n: x % n,
    "reversed %": lambda x, n: n % x,
    "in-place %": lambda x, n: x.clone().remainder_(n),
    "//": lambda x, n: x // n,
    "reversed //": lambda x, n: n // x,
    "in-place //": lambda x, n: x.clone().floor_divide_(n),
    "/": lambda x, n: x / n,
    "truncated": lambda x, n: torch.div(x, n, rounding_mode="trunc"),
    "floor": lambda x, n: torch.div(x, n, rounding_mode="floor"),
    "fmod": torch.fmod,
    "**": lambda x, n: x**n,
    "reversed **": lambda x, n: n**x,
    "float_power": torch.float_power,
    "&": lambda x, n: x & n,
    "reversed &": lambda x, n: n & x,
    "<<": lambda x, n: x << n,
    "reversed <<": lambda x, n: n << x,
    ">": lambda x, n: x > n,
    "xlogy": torch.xlogy,
    "reversed xlogy": lambda x, n: torch.xlogy(n, x),
    "where": lambda x, n: torch.where(x != 2, x, n),
    "where of numbers": lambda x, n: torch.where(x != 2, n, 3),
    "clamp": lambda x, n: x.clamp(n),
    "copysign": torch.copysign,
    "item": lambda x, n: torch.tensor(x.flatten()[0].item()),
    "+": lambda x, n: x + n,
    "*": lambda x, n: x * n,
    "reversed -": lambda x, n: n - x,
}
DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int64)
DTYPES += (torch.bfloat16, torch.float32, torch.float64, torch.complex64)

def compute():
    results = {}
    for dtype, shape, number, name in itertools.product(DTYPES, ((), (5,)), (2, 2.3, True, 1j, -3), OPERATIONS):
        x = torch.tensor([3, 1, 2, 4, 7]).to(dtype)[: shape[0] if shape else 1].reshape(shape)
        try:
            result = OPERATIONS[name](x, number)
            results[name, dtype, shape, number] = str((result.dtype, result.tolist()))
        except Exception as error:
            results[name, dtype, shape, number] = f"{type(error).__name__}: {error}"
    return results

before = compute()
import tpufit
tpufit.init(1)
after = compute()
print(len(before), {key: (result, after[key]) for key, result in before.items() if after[key] != result})
"""


def test_operations_on_numbers_are_unchanged_by_the_start(run_python):
    assert run_python(COMPUTE).stdout == "2240 {}\n"


@pytest.mark.runtime("torch_xla")
def test_tensors_are_collected_while_torch_xla_copies_a_seed(run_python):
    """torch_xla holds a lock while it copies a seed from the host; to delete a tensor, it waits for the same lock."""
    result = run_python("""
        import gc, torch, tpufit
        from torch.utils._python_dispatch import TorchDispatchMode
        from tpufit.drivers.xla.trace_seeds import XlaSeeds

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
                return operation(*args, **(kwargs or {}))

        class Node:
            pass

        tpufit.init(1)
        with Mode():
            for threshold in range(1, 40):
                gc.set_threshold(threshold)
                for _ in range(20):
                    node = Node()
                    node.itself, node.tensor = node, torch.ones(2, device="xla")
                    del node
                    XlaSeeds("xla:0", [1])
        print("done")
    """)
    assert result.stdout == "done\n"
