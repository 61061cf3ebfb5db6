"""`uninterrupted`: several calls that happen as one, even if a signal comes.

Python runs the handler of a signal, such as Ctrl-C, between two of its instructions, never inside a function in C.
So no handler runs between calls that a function in C makes, such as `next` or `list.extend` with the iterator that
`uninterrupted` returns. All that the calls do is fixed before: each is a `partial` of a function in C, with all its
arguments. A later call reads an earlier call's result from a list that the earlier call extends.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any


def uninterrupted(calls: Sequence[partial[Any]]) -> Iterator[Any]:
    """Return an iterator with one item, the last call's result. Asking for it makes all calls, in order.

    Args:
        calls: Calls of functions in C. An error ends them. Without calls there is no item.

    Example:
        >>> numbers, results = [], []
        >>> calls = [partial(numbers.append, 3), partial(numbers.extend, range(2)), partial(sorted, iter(numbers))]
        >>> results.extend(uninterrupted(calls))
        >>> results
        [[0, 1, 3]]
    """
    return islice(map(partial.__call__, calls), max(0, len(calls) - 1), None)
