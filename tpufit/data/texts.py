"""Texts as rows of tokens: `PackedDataset` for short texts, `TokenFile` for a token stream of any length."""

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

from ..errors import ArgumentError, DataError, join_few, require_whole, say_count

# The parts of a token file that are checked in advance: the number of pieces, spread evenly, and the tokens of each.
_PIECES = 16
_PIECE = 1 << 20
IGNORED = -100  # the label that PyTorch's cross entropy and Hugging Face's models ignore


class RowsOfTokens(Dataset[Any]):
    """A map-style dataset of rows of tokens, which reads whole batches."""

    device_transform: Any = None  # turns a batch into the model's input, on the device
    facts: Mapping[str, str] = {}  # facts about the data for a report, by name
    vocab_size: int | None = None  # the number of tokens that the net knows, if given
    longest: int  # the most tokens of a text, or part of a text, with consecutive positions

    def __len__(self) -> int:
        raise NotImplementedError

    def get_batch(self, indices: NDArray[np.int64], epoch: int = 0) -> Any:
        """Return a batch of the rows with these indices; each epoch has the same rows."""
        raise NotImplementedError

    def require_vocabulary(self, vocab_size: int | None, net: str) -> None:
        """Check that a net has an embedding for each token.

        Args:
            vocab_size: The number of the net's embeddings; None if unknown.
            net: The net's name, for the error.

        Raises:
            DataError: A token is too large. Data that aren't read in advance may raise the error when they are read.
        """
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no row {index}: there are {len(self)}")
        return tree_map(lambda column: column[0], self.get_batch(np.array([index])))


class PackedDataset(RowsOfTokens):
    """Short texts packed into rows of one length, so that there is little padding, and one graph runs all batches.

    A text is never split, unless it is longer than a row. Which texts share a row depends only on their lengths, so it
    is the same on every host and in a resumed training; `fit` shuffles the rows.

    A batch is a dict for Hugging Face's causal language models: `"input_ids"`, `"labels"`, `"position_ids"`, which
    restart at 0 in each text, and an `"attention_mask"` of shape (rows, 1, length, length), made on the device, by
    which a token attends only to earlier tokens of the same text. The first token of a text, and padding, have the
    label -100, which losses ignore: each token that can be predicted counts once.

    Args:
        texts: Sequences of token numbers; or dicts of `"input_ids"` and, if some tokens shouldn't be learned,
            `"labels"` of the same length, as in a tokenized data set. A list, or a map-style data set, in which every
            text is read once for its length.
        length: The number of tokens in a row.
        pad: The padding token (default 0).
        too_long: What to do with a text longer than a row: `"split"` it into several (default), or `"truncate"` it.
        shift: True returns pairs `(x, y)` for a net that doesn't shift labels itself: `y` has each token's next token
            (default False).
        mask: False returns `"segment_ids"`, from 1 and 0 for padding, instead of the `"attention_mask"`, for a net that
            makes its own mask (default True).
        vocab_size: The number of tokens that the net knows: larger tokens in a text are an error (default: `fit` checks
            the tokens against the net's embeddings).

    Attributes:
        largest_token: The largest token in the texts.
        padding: The share of tokens that are padding, from 0 to 1.
        padding_before: The share of padding if each text had its own row.

    Raises:
        ArgumentError: An argument is out of range.
        DataError: There are no texts, or a text isn't made of the vocabulary's tokens.

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
                ": list(texts) turns an iterable into a list"
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
        # Only the texts' lengths are kept: each text is read again with its row, so the texts may exceed memory.
        sizes = []
        self.largest_token = 0
        for i in range(len(texts)):
            size, largest = _measure_text(texts[i], i, vocab_size)
            sizes.append(size)
            self.largest_token = max(self.largest_token, largest)
        pieces = [
            (i, first, min(length, size - first))
            for i, size in enumerate(sizes)
            for first in range(0, size if too_long == "split" else min(size, 1), length)
        ]
        if not pieces:
            raise DataError("PackedDataset needs texts, got none with a token")
        self.longest = max(size for _, _, size in pieces)
        if self.longest < 2:
            raise DataError(
                "PackedDataset needs texts of at least two tokens, got none: there is no next token to learn"
            )
        self._pieces = np.array(pieces, dtype=np.int64)
        rows = pack(self._pieces[:, 2], length)
        self._order = np.concatenate(rows)
        self._ends = np.cumsum([len(row) for row in rows])
        used = int(self._pieces[:, 2].sum())
        self.padding = 1 - used / (len(rows) * length)
        self.padding_before = 1 - used / (len(pieces) * length)
        self.device_transform = _add_mask if mask else None
        padding_text = f"{self.padding:.0%}, {self.padding_before:.0%} without packing"
        self.facts = {"padding": padding_text}
        packed = f"{say_count(len(texts), 'text')} in {say_count(len(rows), 'row')} of {length} tokens"
        self._summary = f"{packed}: padding {padding_text}"

    def __len__(self) -> int:
        return len(self._ends)

    def __repr__(self) -> str:
        return f"PackedDataset({self._summary})"

    def require_vocabulary(self, vocab_size: int | None, net: str) -> None:
        """Check that a net has an embedding for each token."""
        if vocab_size is not None and self.largest_token >= vocab_size:
            raise DataError(_explain_unknown("the texts have", self.largest_token, net, vocab_size))
        if vocab_size is not None and self.pad >= vocab_size:
            raise DataError(
                f"pad={self.pad} isn't a token of {net}, which knows {vocab_size} tokens: pass a smaller token"
            )

    def get_batch(self, indices: NDArray[np.int64], epoch: int = 0) -> Any:
        """Return a batch of rows, before `device_transform`.

        Args:
            indices: The rows' indices, from 0, shape `(batch,)`.
            epoch: Unused (default 0): each epoch has the same rows.
        """
        shape = (len(indices), self.length)
        tokens = np.full(shape, self.pad, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        segments = np.zeros(shape, dtype=np.int64)
        for row, index in enumerate(indices):
            at = 0
            pieces = self._order[self._ends[index - 1] if index else 0 : self._ends[index]]
            for number, piece in enumerate(pieces, 1):
                text, first, size = self._pieces[piece]
                ids, wanted = _read_text(self.texts[int(text)])
                part = slice(at, at + size)
                tokens[row, part] = ids[first : first + size]
                positions[row, part] = np.arange(size)
                segments[row, part] = number
                learned = wanted[first + 1 : first + size]
                # With `shift`, a label is at the position of the token before.
                labels[row, at : at + size - 1] = learned
                if not self.shift:
                    labels[row, at] = IGNORED
                    labels[row, at + 1 : at + size] = learned
                at += size
            positions[row, at:] = np.arange(self.length - at)
        x = {"input_ids": tokens, "position_ids": positions, "segment_ids": segments}
        y = torch.from_numpy(labels)
        inputs = {name: torch.from_numpy(column) for name, column in x.items()}
        return (inputs, y) if self.shift else inputs | {"labels": y}


class TokenFile(RowsOfTokens):
    """Rows of tokens from a file of any length, for pre-training. The file is mapped, and only used parts are read.

    Args:
        path: A raw file of token numbers, such as nanoGPT's and Megatron's, or a 1-D `.npy` file.
        length: The number of tokens in a row.
        dtype: The numbers' dtype, for a raw file (default `"uint16"`).
        shift: True returns pairs `(x, y)`, in which `y` has each token's next token, for a net that doesn't shift
            labels itself; False (default) returns dicts of `"input_ids"` and `"labels"` for Hugging Face's models.
        vocab_size: The number of tokens that the net knows: reading a larger token is an error (default: `fit` takes
            the number from the net's embeddings, and checks parts of the file, then each batch).

    Raises:
        ArgumentError: An argument is out of range.
        DataError: The file is too short, or has other numbers; or, when it is read, a token is too large.

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
        self._net: tuple[int, str] | None = None  # the number of tokens that the net knows, and its name
        self._tokens = self._open()
        if self._tokens.ndim != 1 or self._tokens.dtype.kind not in "iu":
            raise DataError(
                f"{path} must hold whole numbers in one dimension, got {self._tokens.dtype} {self._tokens.shape}"
            )
        if len(self) < 1:
            raise DataError(
                f"{path} has {say_count(len(self._tokens), 'token')}, too few for a row of {length}: pass a smaller "
                "length"
            )

    def __len__(self) -> int:
        return (len(self._tokens) - self.shift) // self.length

    def __repr__(self) -> str:
        return f"TokenFile({self.path}: {len(self._tokens):,} tokens in {len(self):,} rows of {self.length})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_tokens"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokens = self._open()  # in a worker, because a mapping can't be pickled

    def require_vocabulary(self, vocab_size: int | None, net: str) -> None:
        """Check that a net has an embedding for each token: in parts of the file now, in all when they are read."""
        self._net = None
        if vocab_size is None or np.iinfo(self._tokens.dtype).max < vocab_size:
            return
        self._net = (vocab_size, net)
        for first in np.unique(np.linspace(0, max(0, len(self._tokens) - _PIECE), _PIECES, dtype=np.int64)):
            self._check(self._tokens[first : first + _PIECE])

    def get_batch(self, indices: NDArray[np.int64], epoch: int = 0) -> Any:
        """Return a batch of rows.

        Args:
            indices: The rows' indices, from 0, shape `(batch,)`.
            epoch: Unused (default 0): each epoch has the same rows.
        """
        places = np.asarray(indices)[:, None] * self.length + np.arange(self.length + self.shift)
        tokens = self._tokens[places]
        self._check(tokens)
        rows = torch.from_numpy(tokens.astype(np.int64))
        return (rows[:, :-1], rows[:, 1:]) if self.shift else {"input_ids": rows, "labels": rows.clone()}

    def _check(self, tokens: NDArray[Any]) -> None:
        """Raise an error if a token is too large, or negative, as with a wrong dtype."""
        if tokens.dtype.kind == "i" and (smallest := int(tokens.min(initial=0))) < 0:
            raise DataError(
                f"{self.path} has token {smallest}: tokens are whole numbers from 0, so check the file's dtype"
            )
        if self.vocab_size is None and self._net is None:
            return
        largest = int(tokens.max(initial=0))
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise DataError(_explain_too_large(largest, f"{self.path}", self.vocab_size))
        if self._net is not None and largest >= self._net[0]:
            raise DataError(_explain_unknown(f"{self.path} has", largest, self._net[1], self._net[0]))

    def _open(self) -> NDArray[Any]:
        if self.path.suffix == ".npy":
            mapped: NDArray[Any] = np.load(self.path, mmap_mode="r")
            return mapped
        size = self.path.stat().st_size
        if size % self.dtype.itemsize:
            raise DataError(
                f"{self.path} has {size} bytes, which isn't a multiple of {self.dtype}'s {self.dtype.itemsize}: pass "
                "the file's dtype"
            )
        return np.memmap(self.path, self.dtype, "r") if size else np.zeros(0, self.dtype)


def pack(sizes: NDArray[np.int64], length: int) -> list[NDArray[np.int64]]:
    """Pack pieces into rows, longest first, each into the fullest row with room; return the pieces of each row.

    All sizes are from 1 to `length`, a row's length.

    Example:
        >>> [row.tolist() for row in pack(np.array([3, 2, 4]), 5)]
        [[2], [0, 1]]
    """
    rows: list[list[int]] = []
    rows_by_room: list[list[int]] = [[] for _ in range(length + 1)]  # the rows by remaining room
    rooms = 0  # a bit set for each remaining room of a row
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                rooms &= ~(1 << room)
            rows[row].append(piece)
        else:
            room = length
            row = len(rows)
            rows.append([piece])
        if room > size:
            rows_by_room[room - size].append(row)
            rooms |= 1 << (room - size)
    return [np.array(row, dtype=np.int64) for row in rows]


def _add_mask(batch: Any) -> Any:
    """Replace the segments by an attention mask, on the device; masked positions have -inf."""
    x = batch[0] if isinstance(batch, (tuple, list)) else batch
    segments: Tensor = x["segment_ids"]
    places = torch.arange(segments.shape[1], device=segments.device)
    sees = (segments[:, None, :, None] == segments[:, None, None, :]) & (places[:, None] >= places)
    # Numbers rather than bools, because unfused attention adds the mask; fused attention accepts both. Each token
    # attends to itself.
    mask = torch.zeros_like(sees, dtype=torch.float32).masked_fill(~sees, float("-inf"))
    inputs = {name: column for name, column in x.items() if name != "segment_ids"} | {"attention_mask": mask}
    return (inputs, *batch[1:]) if isinstance(batch, (tuple, list)) else inputs


def _read_text(text: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens of a text, and their labels."""
    if isinstance(text, Mapping) and "input_ids" not in text:
        raise DataError(f"a text must have 'input_ids', got {join_few([*map(repr, text)])}: tokenize the texts first")
    ids = text["input_ids"] if isinstance(text, Mapping) else text
    labels = text.get("labels", ids) if isinstance(text, Mapping) else ids
    return np.asarray(ids), np.asarray(labels)


def _measure_text(text: Any, index: int, vocab_size: int | None) -> tuple[int, int]:
    """Return the number of a text's tokens, and the largest token."""
    ids, labels = _read_text(text)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise DataError(f"text {index} must be token numbers in one dimension, got {ids.dtype} of shape {ids.shape}")
    if labels.shape != ids.shape:
        raise DataError(f"text {index} has {say_count(len(ids), 'token')} and {say_count(len(labels), 'label')}")
    smallest = int(ids.min(initial=0))
    largest = int(ids.max(initial=0))
    if smallest < 0:
        raise DataError(f"text {index} has token {smallest}: tokens are whole numbers from 0")
    if vocab_size is not None and largest >= vocab_size:
        raise DataError(_explain_too_large(largest, f"text {index}", vocab_size))
    return len(ids), largest


def _explain_too_large(token: int, where: str, vocab_size: int) -> str:
    return f"{where} has token {token}, and vocab_size is {vocab_size}: the tokenizer isn't the net's"


def _explain_unknown(has: str, token: int, net: str, vocab_size: int) -> str:
    return f"{has} token {token}, and {net} knows {vocab_size} tokens: the tokenizer isn't the net's"
