"""Describes a source and a transform by short texts that change when they do.

Ignores the values of globals and the code of libraries. The probe (`maker.plan_manifest`) detects their effect
on the samples, or the user changes `version`.
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

from ...utils.user_code import belongs_to_user

# Longer lists and larger arrays (file names, whole data sets) are not hashed, only probed.
_MANY = 100


def fingerprint(value: Any) -> str:
    """Describe a function, object or class by its name, and a hash of its code and public settings.

    Absolute paths are ignored, so that a cache can be used where the data are in another folder.

    Example:
        >>> from functools import partial
        >>> fingerprint(partial(int, base=2)) == fingerprint(partial(int, base=2)) != fingerprint(partial(int, base=3))
        True
        >>> fingerprint(None)
        'None'
    """
    if value is None:
        return "None"
    named = value.func if isinstance(value, functools.partial) else value
    name = getattr(named, "__qualname__", type(named).__qualname__)
    return f"{name} {hashlib.sha256(repr(_reduce(value, ())).encode()).hexdigest()[:12]}"


def _reduce(value: Any, above: tuple[int, ...]) -> Any:
    """Reduce a value to a nest of plain values with the same `repr` in every process."""
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
        return _reduce_items([(str(key), value[key]) for key in value], above)
    if isinstance(value, (tuple, list)):
        return _reduce_items(value, above)
    if isinstance(value, (set, frozenset)):
        return _reduce_items(sorted(value, key=repr), above)
    if isinstance(value, functools.partial):
        return _reduce((value.func, value.args, value.keywords), above)
    if isinstance(value, MethodType):
        return _reduce((value.__func__, value.__self__), above)
    if isinstance(value, FunctionType):
        kept = inspect.getclosurevars(value).nonlocals
        return value.__qualname__, _get_source(value), _reduce((value.__defaults__, value.__kwdefaults__, kept), above)
    if isinstance(value, type):  # without its module, whose name differs if it is run as a script
        return value.__qualname__, _get_source(value)
    if not (callable(value) or isinstance(value, Dataset)):
        has_repr = repr(value) != object.__repr__(value)
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value)) if has_repr else type(value).__qualname__
    settings = {name: item for name, item in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    if isinstance(value, nn.Module):
        settings["(modules)"] = dict(value.named_children())
        settings["(itself)"] = value.extra_repr()
    return _reduce((getattr(value, "__name__", ""), type(value), settings), above)


def _reduce_items(values: Sequence[Any], above: tuple[int, ...]) -> Any:
    if len(values) > _MANY:
        return f"{len(values)} items"
    return [_reduce(item, above) for item in values]


def _get_source(value: FunctionType | type) -> str:
    """Return the source code, or "" if there is none or it is a library's."""
    try:
        file = inspect.getsourcefile(value) or ""
        if not belongs_to_user(file):
            return ""
        if getattr(value, "__name__", "") != "<lambda>":
            return inspect.getsource(value)
        tree = ast.parse("".join(inspect.findsource(value)[0]))
    except (OSError, TypeError, SyntaxError):  # typed into a prompt, written in C, or in a notebook's cell
        methods = vars(value).values() if isinstance(value, type) else ()
        return "".join(_get_source(method) for method in methods if isinstance(method, FunctionType))
    # Not the whole line, which may have other arguments.
    line = value.__code__.co_firstlineno if isinstance(value, FunctionType) else 0
    lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    return "\n".join(ast.unparse(node) for node in lambdas if node.lineno == line)
