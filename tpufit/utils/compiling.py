"""`compiling`: what `torch.compiler.is_compiling()` answers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def compiling(answer: bool) -> Iterator[None]:
    """A context in which `torch.compiler.is_compiling()` gives this answer; True is that of `torch.export`.

    Libraries then read no values: transformers builds an attention mask without looking if it masks anything.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = answer
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
