"""What makes a step fit that has no room, in the order in which to try it. No torch here: a preflight says it too."""

from .text import size

# The part of a step's memory that is worth a measure against it.
_WORTH = 16


def measures(state: int, needs: int, rows: int, cores: int, split: bool, remat: bool) -> list[str]:
    """Name what makes a training step smaller, what costs the least first.

    Args:
        state: The bytes of weights, gradients and optimizer state on a core.
        needs: The bytes that the step needs on a core.
        rows: The rows of a core.
        cores: The number of cores.
        split: True if the state is split over the cores already.
        remat: True if activations are computed again already.

    Example:
        >>> measures(8 << 30, 20 << 30, rows=8, cores=8, split=False, remat=True)
        ["compile(shard='fsdp'), with 1 GiB instead of 8 GiB of state on a core", 'a smaller batch_size (4) with \
compile(accumulate_steps=2)']
    """
    found = []
    if not split and cores > 1 and state * _WORTH >= needs:
        least = size(state / cores)
        found.append(f"compile(shard='fsdp'), with {least} instead of {size(state)} of state on a core")
    if not remat and (needs - state) * _WORTH >= needs:
        found.append("compile(remat=True), which keeps less of the activations")
    if rows > 1:
        found.append(f"a smaller batch_size ({rows // 2}) with compile(accumulate_steps=2)")
    return found
