"""`find_donated`: the inputs that a graph may write its outputs over, so that memory has only one copy of the state.

A donated tensor is gone once its graph has started, so nothing else may need its memory:

- A step donates only tensors of the state, and only if it replaces all tensors with their memory. Batches, sums, seeds
  and constants may be inputs of the next step, too.
- The user's copies of the state and tensors that aren't aliases get separate memory before a step, see
  `HeldState.separate`, `find_state_aliases` and `unalias`.
- A graph that won't run takes nothing: `Driver.revoke_donation`.
- If a graph fails after it has started, the state's values are lost, see `HeldState.lost`.

`Target.donates` says whether a program's steps donate at all; on a CPU it depends on the size of the state
(`Driver.donates_from`).
"""

from collections.abc import Hashable, Sequence

from .aliases import Aliases, find_shared


def find_donated(
    sources: Sequence[tuple[str, int]], memory: Sequence[Hashable], changed: Sequence[int], aliases: Aliases
) -> tuple[list[int], list[int]]:
    """Find the inputs that a graph may write over, and the state's tensors whose values are gone afterwards.

    Args:
        sources: The list that each input of the graph is in, and its index there, see `Graph.sources`.
        memory: The identity of the memory of each tensor of the state.
        changed: The indices of the state's tensors that the graph replaces.
        aliases: The state's tensors that share memory afterwards. They are replaced together with their owner.

    Returns:
        The indices of these inputs, and the indices of these tensors.

    Example:
        A graph takes two weights and a batch, and replaces the first weight.

        >>> find_donated([("state", 0), ("state", 1), ("input", 0)], ["w", "frozen"], [0], ())
        ([0], [0])
    """
    changes = {*changed, *(i for i, _ in find_shared(aliases))}
    kept = {handle for i, handle in enumerate(memory) if i not in changes}
    donated = list[int]()
    consumed = list[int]()
    for at, (name, i) in enumerate(sources):
        if name == "state" and memory[i] not in kept:
            donated.append(at)
            consumed += [j for j, handle in enumerate(memory) if handle == memory[i]]
    return donated, consumed
