"""Texts as rows of tokens: `PackedDataset` for short ones, `TokenFile` for one stream of any length."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from ..errors import ArgumentError, DataError, counted, few, require_whole

# What is read of a file of tokens beforehand: so many pieces of so many tokens, evenly from all of it.
_PIECES = 16
_PIECE = 1 << 20
IGNORED = -100  # the label that PyTorch's cross entropy and Hugging Face's models leave out


class RowsOfTokens(Dataset[Any]):
    """A map-style dataset that reads a batch of rows at once."""

    device_transform: Any = None  # from a batch to the model's input, run on the device
    facts: Mapping[str, str] = {}  # what a report says of the data, by name
    vocab_size: int | None = None  # the number of tokens that the net knows, if it was given
    longest: int  # the tokens of the longest text, or part of one, that has positions of its own

    def __len__(self) -> int:
        raise NotImplementedError

    def get_batch(self, indices: NDArray[np.int64], epoch: int = 0) -> Any:
        """The rows of a batch, collated, by their numbers; each epoch has the same rows."""
        raise NotImplementedError

    def require_known(self, known: int | None, net: str) -> None:
        """Check that a net, which an error names, knows all tokens.

        Args:
            known: The number of tokens that it knows; None if nobody can tell.
            net: Its name.

        Raises:
            DataError: A token is larger. Data that aren't read beforehand may raise it as they are read.
        """
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no row {index}: there are {len(self)}")
        return tree_map(lambda column: column[0], self.get_batch(np.array([index])))


class PackedDataset(RowsOfTokens):
    """Short texts packed into rows of one length, so that hardly a token is padding, and one graph serves for all.

    A text is never parted, unless it is longer than a row. Which texts share a row depends on their lengths alone, so
    it is the same on every host and in a resumed training; `fit` shuffles the rows.

    A batch is a dict as Hugging Face's causal language models take it: `"input_ids"`, `"labels"`, `"position_ids"`,
    which begin at 0 with each text, and an `"attention_mask"` of shape (rows, 1, length, length), made on the device,
    by which a token looks at those before it in its own text only. The first token of a text, and padding, have the
    label -100, which a loss leaves out: each token that can be predicted counts once.

    Args:
        texts: The texts: sequences of token numbers; or dicts of `"input_ids"` and, if some tokens aren't to be learnt,
            `"labels"` of the same length, such as a tokenized data set has them. A list, or a map-style data set, of
            which every text is read once for its length.
        length: The tokens of a row.
        pad: The token of the padding (default 0).
        too_long: What becomes of a text longer than a row: `"split"` (default) makes several of it, `"truncate"` drops
            its end.
        shift: True to give pairs `(x, y)` for a net that doesn't shift labels itself: `y` has the next token of each
            (default False).
        mask: False to give `"segment_ids"`, from 1, in place of the `"attention_mask"`, and 0 for padding, for a net
            that makes its own (default True).
        vocab_size: The number of tokens that the net knows: a larger one in a text is an error (default: `fit` checks
            it by the net's embeddings).

    Attributes:
        largest_token: The largest number of a token in the texts.
        padding: The share of the tokens that are padding, from 0 to 1.
        padding_before: The share that would be if each text had a row of its own.

    Raises:
        ArgumentError: An argument is out of its range.
        DataError: There are no texts, or one isn't made of tokens of the vocabulary.

    Example:
        >>> data = PackedDataset([[5, 6, 7], [8, 9], [3, 4, 2, 1]], length=5)
        >>> data
        PackedDataset(3 texts in 2 rows of 5 tokens: padding 10%, 40% without packing)
        >>> {name: column.tolist() for name, column in data[1].items()}["position_ids"]
        [0, 1, 2, 0, 1]

    Source: Krell et al., "Efficient sequence packing without cross-contamination", 2021.
    """

    def __init__(
        self,
        texts: Any,
        length: int,
        *,
        pad: int = 0,
        too_long: str = "split",
        shift: bool = False,
        mask: bool = True,
        vocab_size: int | None = None,
    ) -> None:
        require_whole("length", length, 2)
        require_whole("pad", pad, 0)
        if not hasattr(texts, "__len__") or not hasattr(texts, "__getitem__"):
            raise DataError(
                f"PackedDataset needs all texts, as a list or a data set with len() and [], got {type(texts).__name__}"
                ": list(texts) makes a list of what can be read only once"
            )
        if too_long not in ("split", "truncate"):
            raise ArgumentError(f"too_long must be 'split' or 'truncate', got {too_long!r}")
        if vocab_size is not None:
            require_whole("vocab_size", vocab_size)
        self.texts = texts
        self.length = length
        self.pad = pad
        self.shift = shift
        self.mask = mask
        self.vocab_size = vocab_size
        # Of the texts only their lengths are kept: each is read again with its row, so they may be larger than memory.
        sizes = []
        self.largest_token = 0
        for i in range(len(texts)):
            size, largest = _size(texts[i], i, vocab_size)
            sizes.append(size)
            self.largest_token = max(self.largest_token, largest)
        pieces = [
            (i, first, min(length, size - first))
            for i, size in enumerate(sizes)
            for first in range(0, size if too_long == "split" else min(size, 1), length)
        ]
        if not pieces:
            raise DataError("PackedDataset needs texts, got none that has a token")
        self.longest = max(size for _, _, size in pieces)
        if self.longest < 2:
            raise DataError(
                "PackedDataset needs texts of two tokens or more, got none: there is no next token to learn"
            )
        self._pieces = np.array(pieces, dtype=np.int64)
        rows = pack(self._pieces[:, 2], length)
        self._order = np.concatenate(rows)
        self._ends = np.cumsum([len(row) for row in rows])
        used = int(self._pieces[:, 2].sum())
        self.padding = 1 - used / (len(rows) * length)
        self.padding_before = 1 - used / (len(pieces) * length)
        self.device_transform = _with_mask if mask else None
        said = f"{self.padding:.0%}, {self.padding_before:.0%} without packing"
        self.facts = {"padding": said}
        self._said = f"{counted(len(texts), 'text')} in {counted(len(rows), 'row')} of {length} tokens: padding {said}"

    def __len__(self) -> int:
        return len(self._ends)

    def __repr__(self) -> str:
        return f"PackedDataset({self._said})"

    def require_known(self, known: int | None, net: str) -> None:
        """Check that a net, which an error names, knows all tokens."""
        if known is not None and self.largest_token >= known:
            raise DataError(_unknown("the texts have", self.largest_token, net, known))
        if known is not None and self.pad >= known:
            raise DataError(f"pad={self.pad} is no token of {net}, which knows {known} tokens: give one that it knows")

    def get_batch(self, indices: NDArray[np.int64], epoch: int = 0) -> Any:
        """The rows of a batch, collated, before `device_transform`.

        Args:
            indices: The numbers of the rows, from 0, shape `(batch,)`.
            epoch: Without effect: each epoch has the same rows.
        """
        shape = (len(indices), self.length)
        tokens = np.full(shape, self.pad, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        segments = np.zeros(shape, dtype=np.int64)
        for row, index in enumerate(indices):
            at = 0
            own = self._order[self._ends[index - 1] if index else 0 : self._ends[index]]
            for number, piece in enumerate(own, 1):
                text, first, size = self._pieces[piece]
                ids, wanted = _of_text(self.texts[int(text)])
                part = slice(at, at + size)
                tokens[row, part] = ids[first : first + size]
                positions[row, part] = np.arange(size)
                segments[row, part] = number
                learnt = wanted[first + 1 : first + size]
                # Shifted, a label is at the place of the token before it.
                labels[row, at : at + size - 1] = learnt
                if not self.shift:
                    labels[row, at] = IGNORED
                    labels[row, at + 1 : at + size] = learnt
                at += size
            positions[row, at:] = np.arange(self.length - at)
        x = {"input_ids": tokens, "position_ids": positions, "segment_ids": segments}
        y = torch.from_numpy(labels)
        found = {name: torch.from_numpy(column) for name, column in x.items()}
        return (found, y) if self.shift else found | {"labels": y}


class TokenFile(RowsOfTokens):
    """Rows of tokens from one file of any length, for pre-training: it is mapped, and only what is used is read.

    Args:
        path: A file of nothing but token numbers, as nanoGPT and Megatron make them, or a `.npy` file of one dimension.
        length: The tokens of a row.
        dtype: The type of the numbers, unless it is a `.npy` file (default `"uint16"`).
        shift: True to give pairs `(x, y)`, `y` with the next token of each, for a net that doesn't shift labels itself;
            False (default) for dicts of `"input_ids"` and `"labels"`, as Hugging Face's models take them.
        vocab_size: The number of tokens that the net knows: reading a larger one is an error (default: `fit` takes it
            from the net's embeddings, looks for larger ones in parts of the file, and then in each batch).

    Raises:
        ArgumentError: An argument is out of its range.
        DataError: The file is too short, or isn't made of such numbers; or, as it is read, a token is too large.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.arange(10, dtype="uint16").tofile(f"{folder}/train.bin")
        ...     data = TokenFile(f"{folder}/train.bin", length=4, shift=True)
        ...     print(len(data), data[1])
        2 (tensor([4, 5, 6, 7]), tensor([5, 6, 7, 8]))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        length: int,
        dtype: Any = "uint16",
        *,
        shift: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        require_whole("length", length)
        if vocab_size is not None:
            require_whole("vocab_size", vocab_size)
        self.path = Path(path)
        self.length = self.longest = length
        self.dtype = np.dtype(dtype)
        self.shift = shift
        self.vocab_size = vocab_size
        self._net: tuple[int, str] | None = None  # how many tokens the net knows, and its name
        self._tokens = self._open()
        if self._tokens.ndim != 1 or self._tokens.dtype.kind not in "iu":
            raise DataError(
                f"{path} must hold whole numbers in one dimension, got {self._tokens.dtype} {self._tokens.shape}"
            )
        if len(self) < 1:
            raise DataError(f"{path} has {counted(len(self._tokens), 'token')}, too few for a row of {length}")

    def __len__(self) -> int:
        return (len(self._tokens) - self.shift) // self.length

    def __repr__(self) -> str:
        return f"TokenFile({self.path}: {len(self._tokens):,} tokens in {len(self):,} rows of {self.length})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_tokens"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokens = self._open()  # in a worker: a map can't be sent

    def require_known(self, known: int | None, net: str) -> None:
        """Check that a net, which an error names, knows the tokens: parts of the file now, and all as they are read."""
        self._net = None
        if known is None or np.iinfo(self._tokens.dtype).max < known:
            return
        self._net = (known, net)
        for first in np.unique(np.linspace(0, max(0, len(self._tokens) - _PIECE), _PIECES, dtype=np.int64)):
            self._check(self._tokens[first : first + _PIECE])

    def get_batch(self, indices: NDArray[np.int64], epoch: int = 0) -> Any:
        """The rows of a batch, collated.

        Args:
            indices: The numbers of the rows, from 0, shape `(batch,)`.
            epoch: Without effect: each epoch has the same rows.
        """
        places = np.asarray(indices)[:, None] * self.length + np.arange(self.length + self.shift)
        tokens = self._tokens[places]
        self._check(tokens)
        found = torch.from_numpy(tokens.astype(np.int64))
        return (found[:, :-1], found[:, 1:]) if self.shift else {"input_ids": found, "labels": found.clone()}

    def _check(self, tokens: NDArray[Any]) -> None:
        """Raise an error if one of these tokens is too large, or negative, as those of another dtype may be."""
        if tokens.dtype.kind == "i" and (smallest := int(tokens.min(initial=0))) < 0:
            raise DataError(
                f"{self.path} has token {smallest}: tokens are whole numbers from 0, so see which dtype it is of"
            )
        if self.vocab_size is None and self._net is None:
            return
        largest = int(tokens.max(initial=0))
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise DataError(_too_large(largest, f"{self.path}", self.vocab_size))
        if self._net is not None and largest >= self._net[0]:
            raise DataError(_unknown(f"{self.path} has", largest, self._net[1], self._net[0]))

    def _open(self) -> NDArray[Any]:
        if self.path.suffix == ".npy":
            mapped: NDArray[Any] = np.load(self.path, mmap_mode="r")
            return mapped
        size = self.path.stat().st_size
        if size % self.dtype.itemsize:
            raise DataError(f"{self.path} has {size} bytes, no whole number of {self.dtype}: give the dtype it is of")
        return np.memmap(self.path, self.dtype, "r") if size else np.zeros(0, self.dtype)


def pack(sizes: NDArray[np.int64], length: int) -> list[NDArray[np.int64]]:
    """Put pieces into rows: the longest first, each into the fullest row that has room; give the pieces of each row.

    All sizes are from 1 to `length`, that of a row.

    Example:
        >>> [row.tolist() for row in pack(np.array([3, 2, 4]), 5)]
        [[2], [0, 1]]
    """
    rows: list[list[int]] = []
    having: list[list[int]] = [[] for _ in range(length + 1)]  # the rows by the room that they have
    rooms = 0  # a bit for each room that some row has
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = having[room].pop()
            if not having[room]:
                rooms &= ~(1 << room)
            rows[row].append(piece)
        else:
            room = length
            row = len(rows)
            rows.append([piece])
        if room > size:
            having[room - size].append(row)
            rooms |= 1 << (room - size)
    return [np.array(row, dtype=np.int64) for row in rows]


def _with_mask(batch: Any) -> Any:
    """Put the mask of attention in the place of the segments, on the device: what is masked has -inf."""
    x = batch[0] if isinstance(batch, (tuple, list)) else batch
    segments: Tensor = x["segment_ids"]
    places = torch.arange(segments.shape[1], device=segments.device)
    sees = (segments[:, None, :, None] == segments[:, None, None, :]) & (places[:, None] >= places)
    # A number, because attention of plain products adds it; the fused one takes either. Each token sees itself.
    mask = torch.zeros_like(sees, dtype=torch.float32).masked_fill(~sees, float("-inf"))
    own = {name: column for name, column in x.items() if name != "segment_ids"} | {"attention_mask": mask}
    return (own, *batch[1:]) if isinstance(batch, (tuple, list)) else own


def _of_text(text: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens of a text, and their labels."""
    if isinstance(text, Mapping) and "input_ids" not in text:
        raise DataError(f"a text must have 'input_ids', got {few([*map(repr, text)])}: tokenize the texts first")
    ids = text["input_ids"] if isinstance(text, Mapping) else text
    labels = text.get("labels", ids) if isinstance(text, Mapping) else ids
    return np.asarray(ids), np.asarray(labels)


def _size(text: Any, index: int, vocab_size: int | None) -> tuple[int, int]:
    """The number of a text's tokens, and the largest of them."""
    ids, labels = _of_text(text)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise DataError(f"text {index} must be token numbers in one dimension, got {ids.dtype} of shape {ids.shape}")
    if labels.shape != ids.shape:
        raise DataError(f"text {index} has {counted(len(ids), 'token')} and {counted(len(labels), 'label')}")
    smallest = int(ids.min(initial=0))
    largest = int(ids.max(initial=0))
    if smallest < 0:
        raise DataError(f"text {index} has token {smallest}: tokens are whole numbers from 0")
    if vocab_size is not None and largest >= vocab_size:
        raise DataError(_too_large(largest, f"text {index}", vocab_size))
    return len(ids), largest


def _too_large(token: int, where: str, vocab_size: int) -> str:
    return (
        f"{where} has token {token}, and vocab_size is {vocab_size}: the tokens are of another tokenizer than the net"
    )


def _unknown(has: str, token: int, net: str, known: int) -> str:
    return f"{has} token {token}, and {net} knows {known} tokens: they are of another tokenizer than the net"
