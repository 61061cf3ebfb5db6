"""Sizes, dtypes and tables as text for people. No torch here: the doctor must also run where it can't be loaded."""

import io

from rich.console import Console, RenderableType


def size(nbytes: float) -> str:
    """Bytes in words.

    Example:
        >>> size(0), size(1023), size(1536), size(3 << 30)
        ('0 B', '1023 B', '1.5 KiB', '3 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def bytes_of(text: str) -> int:
    """The number of bytes in a number with a unit, as compilers write it.

    Example:
        >>> bytes_of("1.5K"), bytes_of("20")
        (1536, 20)
    """
    number = text.rstrip("KMGT")
    return int(float(number) * (1 << 10 * (" KMGT".index(text[len(number) :] or " "))))


def dtype_name(dtype: object) -> str:
    """The short name of one of PyTorch's dtypes.

    Example:
        >>> import torch
        >>> dtype_name(torch.float32)
        'float32'
    """
    return str(dtype).removeprefix("torch.")


def rendered(content: RenderableType, width: int) -> str:
    """The plain text of something that rich draws, at most so many columns wide, without spaces at the lines' ends."""
    text = io.StringIO()
    Console(file=text, width=width).print(content)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
