"""The blocks of a module whose activations are rematerialized in the backward pass: `compile(remat=...)`."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn

from ..errors import ArgumentError, join_few
from ..utils.repeated_blocks import find_repeated_blocks, keep_outermost

RematArgument: TypeAlias = "bool | str | list[str] | tuple[str, ...] | Mapping[str, str] | None"

# The policies, each with what a block keeps for its backward pass, the most first. The rest is computed again.
REMAT_POLICIES: Mapping[str, str] = {
    "attention": "all but the inside of attention",
    "dots": "products with weights, and the result of attention",
    "nothing": "only its inputs",
}
_FORMS = (
    f"True, {', '.join(map(repr, REMAT_POLICIES))}, patterns of module names, as in ['blocks.*'], or a policy for "
    "each, as in {'blocks.*': 'dots'}"
)


def find_blocks(remat: RematArgument, module: nn.Module) -> dict[str, str]:
    """Find the blocks that `compile(remat=...)` names, and return each one's policy by its name, outermost blocks only.

    Raises:
        ArgumentError: A block or a policy doesn't exist.

    Example:
        >>> net = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1), 2, enable_nested_tensor=False)
        >>> find_blocks("dots", net)
        {'layers.0': 'dots', 'layers.1': 'dots'}
        >>> find_blocks({"layers.0": "attention", "*.linear1": "nothing"}, net)
        {'layers.0': 'attention', 'layers.1.linear1': 'nothing'}
    """
    if remat is None or remat is False:
        return {}
    policy = "nothing" if remat is True else remat
    if isinstance(policy, str) and policy in REMAT_POLICIES:
        learning = [
            name
            for name in find_repeated_blocks(module)
            if any(p.requires_grad for p in module.get_submodule(name).parameters())
        ]
        if not learning:
            raise ArgumentError(
                f"remat={remat!r} looks for blocks that {type(module).__name__} repeats, as a ModuleList or Sequential "
                f"of several layers of one class, each made of layers, and finds none: name the blocks, as in "
                f"remat={_example(module, policy)}"
            )
        return dict.fromkeys(keep_outermost(learning), policy)
    policies = _parse_patterns(remat)
    names = [name for name, _ in module.named_modules() if name]
    for pattern in policies:
        if not any(fnmatchcase(name, pattern) for name in names):
            other = f", and isn't a policy ({', '.join(REMAT_POLICIES)})" if isinstance(remat, str) else ""
            raise ArgumentError(
                f"remat names {pattern!r}, but {type(module).__name__} has no such module{other}; it has "
                f"{join_few(names) or 'none'}"
            )
    # The first pattern that fits decides.
    chosen = {name: next((policy for p, policy in policies.items() if fnmatchcase(name, p)), "") for name in names}
    return {name: chosen[name] for name in keep_outermost([name for name, policy in chosen.items() if policy])}


def list_policies(remat: RematArgument) -> list[RematArgument]:
    """List the values of `remat` to try for a step that runs out of memory, cheapest first, for the same patterns.

    Example:
        >>> list_policies("dots"), list_policies(["head"])[1]
        ([None, 'attention', 'dots', 'nothing'], {'head': 'attention'})
    """
    if remat is None or isinstance(remat, bool) or (isinstance(remat, str) and remat in REMAT_POLICIES):
        return [None, *REMAT_POLICIES]
    return [None, *({pattern: policy for pattern in _parse_patterns(remat)} for policy in REMAT_POLICIES)]


def _parse_patterns(remat: Any) -> dict[str, str]:
    """Return the policy of each pattern."""
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


def _example(module: nn.Module, policy: str) -> str:
    names = [name for name, _ in module.named_children()][:1] or ["*"]
    return repr(names if policy == "nothing" else dict.fromkeys(names, policy))
