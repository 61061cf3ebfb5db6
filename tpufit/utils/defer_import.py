"""`defer_import`: imports a module without running it, until a name in it is used.

`importlib.util.LazyLoader` does the same, but `inspect` makes it run the module by walking over all modules.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


@contextmanager
def defer_import(name: str) -> Iterator[None]:
    """Return a context in which importing this module doesn't run it.

    Example:
        >>> with defer_import("this"):  # which would print something
        ...     import this
        >>> this.c  # doctest: +ELLIPSIS
        The Zen of Python, by Tim Peters
        ...
    """
    finder = _Finder(name)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == self._name else None
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferringLoader(spec.loader)
        return spec


class _DeferringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _DeferredModule(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader


class _DeferredModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        # `import *` reads __all__; Python and inspect read other names of this kind from every module.
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None and self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)
