"""Compares the hosts of a pod before the first step, because no host would notice a difference later.

Each host runs the same programs with its copy of the weights, and the runtime doesn't check that the copies are equal.
So the code of the step, the arguments and the versions are compared, and differing weights and random numbers are taken
from process 0.
"""

import hashlib
import platform
from collections.abc import Iterable, Mapping
from inspect import isfunction
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from ..backend import Placement
from ..data import Stream
from ..errors import HostError, join_few, say_count
from ..hosts import all_gather, broadcast
from ..runtime import copy_into, process_count, to_host, versions
from ..step import Engine
from ..utils.json_codec import is_json
from ..utils.python_state import has_fixed_variables
from ..utils.user_code import warn


def compare_hosts(engine: Engine, **arguments: Any) -> None:
    """Check that all hosts run the same step with equal arguments; of objects only the classes are compared.

    Raises:
        HostError: The hosts differ; the message says in what.
    """
    if process_count() == 1:
        return
    compiled = {f"compile({name})": value for name, value in (engine.config.arguments or {}).items()}
    facts = {
        "the net": str(engine.model.module),
        "the code of the step": _digest_code(engine),
        "the step": engine.state.numbers.step,
        "Python": platform.python_version(),
        **versions(),
        **compiled,
        **arguments,
    }
    everywhere = all_gather({name: _to_comparable(value) for name, value in facts.items()})
    first = everywhere[0]
    for index, other in enumerate(everywhere):
        differing = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if differing:
            pairs = join_few(
                [f"{name}: {_shorten(first.get(name))} and {_shorten(other.get(name))}" for name in differing]
            )
            raise HostError(
                f"process 0 and process {index} must run the same step, but these differ: {pairs}. Run one script with "
                "the same arguments on all hosts"
            )


def move_model(engine: Engine, placement: Placement, compared: bool = False) -> None:
    """Move the model to its cores; where weights differ between hosts, all take process 0's.

    Weights that are on their cores already are compared only if `compared` is True.
    """
    several = placement.hosts > 1
    new = engine.state.placement != placement
    if several and new:  # before the move, because each core's part of a split weight comes from its host
        _share_weights(engine)
    engine.move_to(placement)
    if several and compared and not new:
        _share_weights(engine)


def share_seed() -> None:
    """Take the seed from process 0, with a warning if another host had a different seed."""
    if share_random_state():
        warn(
            "the hosts had different seeds, and all use process 0's now. Call tpufit.set_random_seed or "
            "torch.manual_seed with the same number on all of them"
        )


def share_random_state(data: Stream | None = None) -> bool:
    """Take the states of PyTorch's and the data's random generators from process 0; True if any differed."""
    if process_count() == 1:
        return False
    generators = [] if data is None else list(data.generators)
    states = [torch.get_rng_state(), *(generator.get_state() for generator in generators)]
    theirs = broadcast(states)
    differ = [not torch.equal(state, other) for state, other in zip(states, theirs, strict=True)]
    if differ[0]:
        torch.set_rng_state(theirs[0])
    for generator, state, differs in zip(generators, theirs[1:], differ[1:], strict=True):
        if differs:
            generator.set_state(state)
    return any(all_gather(any(differ)))


def _share_weights(engine: Engine) -> None:
    engine.state.write_back()
    tensors, names = engine.state.tensors()
    # Split tensors aren't compared, because each host has other parts of them.
    tensors = {key: tensor for key, tensor in tensors.items() if key not in engine.state.device.shardings}
    values = to_host(list(tensors.values()), "state")
    digests = all_gather([_digest(value) for value in values])
    if len({len(of_host) for of_host in digests}) > 1:
        raise HostError(
            f"the hosts have different numbers of tensors: {[len(of_host) for of_host in digests]}. Build the same net "
            "and optimizer on all hosts"
        )
    differing = [i for i in range(len(values)) if len({of_host[i] for of_host in digests}) > 1]
    if not differing:
        return
    theirs = broadcast([values[i] for i in differing])
    keys = list(tensors)
    copy_into([tensors[keys[i]] for i in differing], theirs, engine.state.placement)
    named = [names.get(keys[i], "state of an optimizer") for i in differing]
    warn(
        f"{say_count(len(named), 'tensor')} differed between the hosts, and all use process 0's now: "
        f"{join_few(named)}. Seed all hosts alike, with tpufit.set_random_seed, before you build the net"
    )


def _digest(tensor: Tensor) -> bytes:
    data = tensor.detach().contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=16, key=str(tensor.shape).encode()[:64]).digest()


def _digest_code(engine: Engine) -> str:
    """Return a digest of the user's classes whose Python a step runs."""
    kinds = {type(part) for part in (engine.model, *(m for module in engine.state.modules for m in module.modules()))}
    classes = {base for kind in kinds for base in kind.__mro__ if not has_fixed_variables(base)}
    functions = sorted(
        (f"{kind.__qualname__}.{name}", repr(_list_code_facts(value.__code__)))
        for kind in classes
        for name, value in vars(kind).items()
        if isfunction(value)
    )
    return hashlib.blake2b(repr(functions).encode(), digest_size=8).hexdigest()


def _list_code_facts(code: CodeType) -> list[Any]:
    return [code.co_code, code.co_names, *map(_normalize_constant, code.co_consts)]


def _normalize_constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _list_code_facts(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value


def _to_comparable(value: Any) -> Any:
    if is_json(value):
        return value
    if isinstance(value, Mapping):
        return {str(key): _to_comparable(item) for key, item in value.items()}
    if isinstance(value, Iterable) and isinstance(value, (list, tuple, set, range)):
        return [_to_comparable(item) for item in value]
    return getattr(value, "__qualname__", type(value).__qualname__)


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else f"{text[:50]}..."
