"""`replaced`: replaces methods of an object in a context."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: object, **methods: Any) -> Iterator[None]:
    """Return a context in which an object has other methods."""
    attributes = vars(owner)
    before = {name: attributes[name] for name in methods if name in attributes}
    attributes.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del attributes[name]
        attributes.update(before)
