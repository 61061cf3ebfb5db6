"""Sizes, dtypes and tables as text. Imports no torch, because the doctor must run even if torch can't be loaded."""

import io
from collections.abc import Iterable, Mapping

from rich.console import Console, RenderableType


def format_bytes(nbytes: float) -> str:
    """Format a number of bytes.

    Example:
        >>> format_bytes(0), format_bytes(1023), format_bytes(1536), format_bytes(3 << 30)
        ('0 B', '1023 B', '1.5 KiB', '3 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def parse_bytes(text: str) -> int:
    """Parse a number of bytes with a unit, as compilers write it.

    Example:
        >>> parse_bytes("1.5K"), parse_bytes("20")
        (1536, 20)
    """
    number = text.rstrip("KMGT")
    return int(float(number) * (1 << 10 * (" KMGT".index(text[len(number) :] or " "))))


def dtype_name(dtype: object) -> str:
    """Return the short name of a PyTorch dtype.

    Example:
        >>> import torch
        >>> dtype_name(torch.float32)
        'float32'
    """
    return str(dtype).removeprefix("torch.")


def render(content: RenderableType, width: int) -> str:
    """Render rich content as plain text, at most `width` columns wide, without trailing spaces."""
    text = io.StringIO()
    Console(file=text, width=width).print(content)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def match_known_name(name: str, known: Iterable[str]) -> str:
    """Return the known name that a class name matches; other names are returned unchanged.

    Example:
        >>> match_known_name("MeanSquaredError", ["mean_squared_error"])
        'mean_squared_error'
        >>> match_known_name("CrossEntropyLoss", ["cross_entropy"])
        'cross_entropy'
    """
    if name == name.lower():
        return name
    return {_normalize(each).removesuffix("loss"): each for each in known}.get(
        _normalize(name).removesuffix("loss"), name
    )


def find_answer(name: str, answers: Mapping[str, str]) -> str:
    """Return the sentence for a name, in snake case or as a class name; "" if there is none.

    Example:
        >>> find_answer("BinaryIoU", {"binary_io_u": "Use 'mean_iou'."})
        "Use 'mean_iou'."
    """
    return {_normalize(known): sentence for known, sentence in answers.items()}.get(_normalize(name), "")


def _normalize(name: str) -> str:
    return name.replace("_", "").lower()
