"""`replacing_attributes`: an object has other methods or attributes in a context."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replacing_attributes(owner: object, **others: Any) -> Iterator[None]:
    """A context in which an object, such as a module of PyTorch, has other methods or attributes."""
    attributes = vars(owner)
    before = {name: attributes[name] for name in others if name in attributes}
    attributes.update(others)
    try:
        yield
    finally:
        for name in others:
            del attributes[name]
        attributes.update(before)
