"""Files that are whole or not there: written beside their target, and committed by a rename."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Give a draft to write beside a file; it takes the file's place when the block ends without an error.

    Whenever the process may die, the file is the old one or the new one. After an error nothing of the draft is left;
    only a killed process leaves one, which `drop_drafts` removes.

    Args:
        target: The file. Its folder must exist.

    Yields:
        The path of the draft, where nothing is yet.

    Raises:
        OSError: The file system refused.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder, "a.txt")) as draft:
        ...         size = draft.write_text("whole")
        ...     os.listdir(folder)
        ['a.txt']
    """
    draft = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        yield draft
        with open(draft, "rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # else the rename itself may be lost with the power
    finally:
        os.close(folder)


def drop_drafts(folder: Path) -> None:
    """Remove the drafts that killed processes left. The caller sees to it that no other one is writing there.

    Args:
        folder: Where to look.
    """
    for draft in folder.glob(".*.tmp-*"):
        draft.unlink(missing_ok=True)
