"""`compiling`: sets the result of `torch.compiler.is_compiling()`."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def compiling(answer: bool) -> Iterator[None]:
    """Return a context in which `torch.compiler.is_compiling()` returns `answer`; True as in `torch.export`.

    With True, libraries read no values: transformers builds an attention mask without checking whether it masks
    anything.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = answer
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
