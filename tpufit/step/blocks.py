"""The blocks of a module that compute their activations again in the backward pass: `compile(remat=...)`."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn

from ..backend import REMAT_POLICIES
from ..errors import ArgumentError, few
from ..utils.blocks import outermost, repeated

RematArgument: TypeAlias = "bool | str | list[str] | tuple[str, ...] | Mapping[str, str] | None"

_FORMS = (
    f"True, {', '.join(map(repr, REMAT_POLICIES))}, patterns of module names, as in ['blocks.*'], or a policy for "
    "each, as in {'blocks.*': 'dots'}"
)


def blocks(remat: RematArgument, module: nn.Module) -> dict[str, str]:
    """Find the blocks that `compile(remat=...)` names, without those inside of others: the policy of each, by name.

    Raises:
        ArgumentError: There are no such blocks, or is no such policy.

    Example:
        >>> net = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1), 2, enable_nested_tensor=False)
        >>> blocks("dots", net)
        {'layers.0': 'dots', 'layers.1': 'dots'}
        >>> blocks({"layers.0": "attention", "*.linear1": "nothing"}, net)
        {'layers.0': 'attention', 'layers.1.linear1': 'nothing'}
    """
    if remat is None or remat is False:
        return {}
    policy = "nothing" if remat is True else remat
    if isinstance(policy, str) and policy in REMAT_POLICIES:
        found = [
            name for name in repeated(module) if any(p.requires_grad for p in module.get_submodule(name).parameters())
        ]
        if not found:
            raise ArgumentError(
                f"remat={remat!r} looks for blocks that {type(module).__name__} repeats, as a ModuleList or Sequential "
                f"of several layers of one class, each made of layers, and finds none: name them, as in "
                f"remat={_named(module, policy)}"
            )
        return dict.fromkeys(outermost(found), policy)
    policies = _by_pattern(remat)
    names = [name for name, _ in module.named_modules() if name]
    for pattern in policies:
        if not any(fnmatchcase(name, pattern) for name in names):
            other = f", and is no policy ({', '.join(REMAT_POLICIES)})" if isinstance(remat, str) else ""
            raise ArgumentError(
                f"remat names {pattern!r}, but {type(module).__name__} has no such module{other}; it has "
                f"{few(names) or 'none'}"
            )
    # The first pattern that fits decides.
    chosen = {name: next((own for p, own in policies.items() if fnmatchcase(name, p)), "") for name in names}
    return {name: chosen[name] for name in outermost([name for name, own in chosen.items() if own])}


def policies_for(remat: RematArgument) -> list[RematArgument]:
    """The arguments to try where a step has no room, what costs the least first; the patterns given to `compile` stay.

    Example:
        >>> policies_for("dots"), policies_for(["head"])[1]
        ([None, 'attention', 'dots', 'nothing'], {'head': 'attention'})
    """
    if remat is None or isinstance(remat, bool) or (isinstance(remat, str) and remat in REMAT_POLICIES):
        return [None, *REMAT_POLICIES]
    return [None, *({pattern: policy for pattern in _by_pattern(remat)} for policy in REMAT_POLICIES)]


def _by_pattern(remat: Any) -> dict[str, str]:
    """The policy of each pattern."""
    patterns = [remat] if isinstance(remat, str) else remat
    if not isinstance(patterns, (list, tuple, Mapping)) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ArgumentError(f"remat must be None, {_FORMS}, got {remat!r}")
    if not isinstance(patterns, Mapping):
        return dict.fromkeys(patterns, "nothing")
    known = list(REMAT_POLICIES)
    wrong = [policy for policy in patterns.values() if policy not in known]
    if wrong:
        raise ArgumentError(f"remat's policies are {', '.join(map(repr, known))}, got {wrong[0]!r}")
    return dict(patterns)


def _named(module: nn.Module, policy: str) -> str:
    names = [name for name, _ in module.named_children()][:1] or ["*"]
    return repr(names if policy == "nothing" else dict.fromkeys(names, policy))
