"""`ObjectWalk`: visits the objects inside a value, each once, to a limited depth.

`SavedAttributes` and `python_state` are two such walks. Each says what it yields for an object of a kind.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

Named = Iterator[tuple[str, Any]]


class ObjectWalk(ABC):
    """A walk over objects, through containers, bound arguments and the methods' objects.

    Args:
        max_objects: The number of objects to visit.
        skip: Objects to leave out.
    """

    def __init__(self, max_objects: int, skip: Iterable[object] = ()) -> None:
        self._max_objects = max_objects
        # The objects themselves, because the `id` of a temporary one, such as `f_locals`, may be used again.
        self._seen: dict[int, object] = {id(each): each for each in skip}

    def walk(self, name: str, value: Any, depth: int) -> Named:
        """Yield what the walk finds in a value, by name, to the remaining depth."""
        if not depth or isinstance(value, ModuleType) or id(value) in self._seen or len(self._seen) > self._max_objects:
            return
        self._seen[id(value)] = value
        if isinstance(value, partial):
            for i, part in enumerate((value.func, value.args, value.keywords)):
                yield from self.walk(f"{name}[{i}]", part, depth - 1)
        elif isinstance(value, MethodType):
            yield from self.walk(name, value.__self__, depth)
        elif isinstance(value, (Mapping, list, tuple, deque)):
            yield from self.visit_container(name, value, depth)
        elif isinstance(value, FunctionType):
            yield from self.visit_function(name, value, depth)
        elif isinstance(value, nn.Module):
            for path, part in value.named_modules():
                if part is value or id(part) not in self._seen:
                    self._seen[id(part)] = part
                    yield from self.visit_part(name, path, part, depth)
        else:
            yield from self.visit_object(name, value, depth)

    @abstractmethod
    def visit_container(self, name: str, value: Any, depth: int) -> Named:
        """Yield what the walk finds in a mapping, a list, a tuple or a deque."""

    @abstractmethod
    def visit_function(self, name: str, function: FunctionType, depth: int) -> Named:
        """Yield what the walk finds in a function."""

    @abstractmethod
    def visit_part(self, name: str, path: str, part: nn.Module, depth: int) -> Named:
        """Yield what the walk finds in a module's part at a path, which is "" for the module itself."""

    @abstractmethod
    def visit_object(self, name: str, value: Any, depth: int) -> Named:
        """Yield what the walk finds in any other object."""
