"""`compiling`: sets the result of `torch.compiler.is_compiling()`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def compiling(answer: bool) -> Iterator[None]:
    """Return a context in which `torch.compiler.is_compiling()` returns `answer`; True as in `torch.export`.

    With True, libraries read no values: transformers builds an attention mask without checking whether it masks
    anything. Functions made by `torch.compile` then run their Python, because a compiler inside another would have to
    trace our own.
    """
    # Without an import: only `torch.compile` needs this module, which takes seconds to import.
    uses_dynamo = answer and "torch._dynamo" in sys.modules
    stance = torch.compiler.set_stance("force_eager") if uses_dynamo else nullcontext()
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = answer
    try:
        with stance:
            yield
    finally:
        torch.compiler._is_compiling_flag = before
