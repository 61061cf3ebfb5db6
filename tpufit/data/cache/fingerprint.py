"""Descriptions of a source and a transform, in a few words that change when they do.

The values of globals and the code of installed packages are not looked at. Their effect on the samples shows in the
probe (`maker.plan`), or the user tells of it by another `version`.
"""

import ast
import functools
import hashlib
import inspect
import os
import re
from collections.abc import Sequence
from types import FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset

# Longer lists and larger arrays (file names, whole data sets) are left to the probe.
_MANY = 100
_INSTALLED = ("site-packages", "dist-packages")


def describe(value: Any) -> str:
    """Describe a function, object or class by its name, and a hash of its code and of its public settings.

    Absolute paths don't count, so that a cache may be used where the data lie in another folder.

    Example:
        >>> from functools import partial
        >>> describe(partial(int, base=2)) == describe(partial(int, base=2)) != describe(partial(int, base=3))
        True
        >>> describe(None)
        'None'
    """
    if value is None:
        return "None"
    named = value.func if isinstance(value, functools.partial) else value
    name = getattr(named, "__qualname__", type(named).__qualname__)
    return f"{name} {hashlib.sha256(repr(_facts(value, ())).encode()).hexdigest()[:12]}"


def _facts(value: Any, above: tuple[int, ...]) -> Any:
    """A nest of plain values with the same `repr` in every process."""
    if value is None or isinstance(value, (bool, int, float, complex, bytes)):
        return value
    if isinstance(value, (str, os.PathLike)):
        return "a path" if os.path.isabs(value) else str(value)
    if isinstance(value, (Tensor, np.ndarray)):
        return str(value.dtype), tuple(value.shape), value.tolist() if np.prod(value.shape) <= _MANY else ...
    if id(value) in above:
        return "itself"
    above = (*above, id(value))
    if isinstance(value, dict):
        return _several([(str(key), value[key]) for key in value], above)
    if isinstance(value, (tuple, list)):
        return _several(value, above)
    if isinstance(value, (set, frozenset)):
        return _several(sorted(value, key=repr), above)
    if isinstance(value, functools.partial):
        return _facts((value.func, value.args, value.keywords), above)
    if isinstance(value, MethodType):
        return _facts((value.__func__, value.__self__), above)
    if isinstance(value, FunctionType):
        kept = inspect.getclosurevars(value).nonlocals
        return value.__qualname__, _code(value), _facts((value.__defaults__, value.__kwdefaults__, kept), above)
    if isinstance(value, type):  # without its module, which is another one when that is run as a script
        return value.__qualname__, _code(value)
    if not (callable(value) or isinstance(value, Dataset)):
        own = repr(value) != object.__repr__(value)
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value)) if own else type(value).__qualname__
    settings = {name: item for name, item in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    if isinstance(value, nn.Module):
        settings["(modules)"] = dict(value.named_children())
        settings["(itself)"] = value.extra_repr()
    return _facts((getattr(value, "__name__", ""), type(value), settings), above)


def _several(values: Sequence[Any], above: tuple[int, ...]) -> Any:
    if len(values) > _MANY:
        return f"{len(values)} items"
    return [_facts(item, above) for item in values]


def _code(value: FunctionType | type) -> str:
    """The source text, where there is one and it is not an installed package's."""
    try:
        file = inspect.getsourcefile(value) or ""
        if any(part in _INSTALLED for part in file.split(os.sep)):
            return ""
        if getattr(value, "__name__", "") != "<lambda>":
            return inspect.getsource(value)
        tree = ast.parse("".join(inspect.findsource(value)[0]))
    except (OSError, TypeError, SyntaxError):  # typed into a prompt, written in C, or in a notebook's cell
        methods = vars(value).values() if isinstance(value, type) else ()
        return "".join(_code(method) for method in methods if isinstance(method, FunctionType))
    # Not the whole line: arguments beside the lambda must not count.
    line = value.__code__.co_firstlineno if isinstance(value, FunctionType) else 0
    lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    return "\n".join(ast.unparse(node) for node in lambdas if node.lineno == line)
