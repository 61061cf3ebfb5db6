"""Operations on tensors and numbers of several dtypes, on the device and in PyTorch."""

import itertools
import operator

import pytest
import torch
from torch import Tensor

NUMBERS = torch.tensor([[-7.5, -3, -1, 0, 0.35], [0.9, 1, 2, 3, 5.5]])
DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.bfloat16, torch.float32]
SOME = [torch.bool, torch.uint8, torch.int64, torch.float32]
OPERATIONS = {
    "%": operator.mod,
    "% reversed": lambda a, b: b % a,
    "&": operator.and_,
    "*": operator.mul,
    "/": operator.truediv,
    "/ reversed": lambda a, b: b / a,
    "//": operator.floordiv,
    "// reversed": lambda a, b: b // a,
    "<": operator.lt,
    "<<": operator.lshift,
    "==": operator.eq,
    ">=": operator.ge,
    ">>": operator.rshift,
    "^": operator.xor,
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b + 1, value=2),
    "addcmul": lambda a, b: torch.addcmul(a, b, b, value=2),
    "atan2": torch.atan2,
    "cat": lambda a, b: torch.cat([a, b]),
    "clamp": lambda a, b: a.clamp(b, b + 2),
    "clamp_max": torch.clamp_max,
    "clamp_min": torch.clamp_min,
    "clamp(max)": lambda a, b: a.clamp(max=b),
    "divided and cut off": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "fmod": torch.fmod,
    "masked_fill": lambda a, b: a.masked_fill(a > 0, b),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "pow": torch.pow,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "where reversed": lambda a, b: torch.where(a > 0, b, a),
    "xlogy": torch.xlogy,
}
# In whole numbers; PyTorch returns int64 for most.
OF_INTEGERS = {
    "cumprod": lambda a: a.cumprod(1),
    "cumsum": lambda a: a.cumsum(1),
    "mean": lambda a: a.mean(dtype=torch.float32),
    "means of rows": lambda a: a.mean(1, dtype=torch.float32),
    **{
        name: getattr(torch, name)
        for name in ("acos", "asinh", "atan", "cos", "erf", "exp", "log1p", "rsqrt", "sigmoid", "sqrt", "tanh")
    },
    "logsumexp": lambda a: a.logsumexp(1),
    "positions": lambda a: (a > 0).cumsum(1) - 1,
    "prod": lambda a: a.prod(1),
    "reciprocal": torch.reciprocal,
    "sum": lambda a: a.sum(1),
    "sum in float32": lambda a: a.sum(1, dtype=torch.float32),
}


def make_tensor(dtype, shift=0):
    numbers = NUMBERS.roll(shift, 1)
    return (numbers.abs() * 9 if dtype is torch.uint8 else numbers).to(dtype)


def list_operands(dtypes, shift):
    tensors = [make_tensor(dtype, shift) for dtype in dtypes]
    return [*tensors, *(tensor[1, 1] for tensor in tensors)]


def compare(place, function, *operands):
    """Return a description of the difference from PyTorch, or "" if there is none, or PyTorch refuses the operands."""
    try:
        theirs = function(*operands)
    except (RuntimeError, NotImplementedError, TypeError):
        return ""
    sent = [place.send([x.clone()])[0] if isinstance(x, Tensor) else x for x in operands]
    given = [f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x) for x in operands]
    try:
        ours = function(*sent).cpu()
        rounding = 2e-2 if torch.bfloat16 in {theirs.dtype, *(x.dtype for x in sent if isinstance(x, Tensor))} else 1e-5
        torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding, equal_nan=True)
    except Exception as error:
        return f"of {', '.join(given)}: {error}"
    return ""


@pytest.mark.cores(1)
@pytest.mark.runtime("torch_xla")
@pytest.mark.parametrize(
    "dtypes",
    [pytest.param(SOME, id="some"), pytest.param(DTYPES, id="all", marks=[pytest.mark.soak, pytest.mark.slow])],
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operands_of_two_dtypes_give_pytorchs_result(cores, place, name, dtypes):
    pairs = itertools.product(list_operands(dtypes, 0), [*list_operands(dtypes, 2), True, 2, 2.5, -3])
    differences = [compare(place, OPERATIONS[name], *pair) for pair in pairs]
    assert not [difference for difference in differences if difference]


@pytest.mark.cores(1, 8)
@pytest.mark.runtime("torch_xla")
@pytest.mark.parametrize("name", OF_INTEGERS)
def test_reductions_of_integers_give_pytorchs_result(cores, place, name):
    differences = [compare(place, OF_INTEGERS[name], make_tensor(dtype)) for dtype in DTYPES[:5]]
    assert not [difference for difference in differences if difference]
