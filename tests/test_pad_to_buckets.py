"""Rows of different lengths are padded to a few lengths, and many shapes are reported."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpufit.data import PadToBuckets
from tpufit.errors import ArgumentError, DataError
from tpufit.step.shape_watch import ShapeWatch
from tpufit.utils.strict import Strict


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_each_batch_has_one_of_the_lengths_and_all_its_data(lengths):
    samples = [{"text": np.arange(1, n + 1), "label": n} for n in lengths]
    batch = PadToBuckets([5, 10, 20], padding={"text": 0, "label": 0})(samples)
    assert batch["text"].shape[1] == min(b for b in (5, 10, 20) if b >= max(lengths))
    assert batch["label"].tolist() == lengths
    for row, n in zip(batch["text"], lengths, strict=True):
        assert row[:n].tolist() == list(range(1, n + 1)) and not row[n:].any()


def test_each_field_has_its_own_padding():
    samples = [(torch.ones(2, 3), torch.ones(2), torch.ones(3, 8, 8)) for _ in range(2)]
    x, y, image = PadToBuckets([4], padding=(0.5, -100, None))(samples)
    assert x.shape == (2, 4, 3) and x[0, 3].tolist() == [0.5] * 3
    assert y[0].tolist() == [1, 1, -100, -100]
    assert image.shape == (2, 3, 8, 8)


def test_too_long_samples_and_wrong_arguments_are_errors():
    with pytest.raises(DataError, match="length 7, but the longest bucket is 4"):
        PadToBuckets([4, 2])([torch.ones(7)])
    with pytest.raises(ArgumentError, match="one or more whole numbers"):
        PadToBuckets([])
    with pytest.raises(ArgumentError, match="padding has 2 values, but a sample has 1 field$"):
        PadToBuckets([4], padding=(0, 0))([torch.ones(2)])


def test_many_shapes_are_reported_once():
    watch = ShapeWatch("train")
    batches = [({"text": torch.zeros(4, n)}, torch.zeros(4)) for n in range(10)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(7):
            watch.note(number, batches[number], Strict())
            watch.note(number, batches[number], Strict())
    with pytest.warns(UserWarning, match=r"batches of 8 shapes.*x\['text'\] had the shape \(4, 6\), and now \(4, 7\)"):
        watch.note(7, batches[7], Strict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.note(8, batches[8], Strict())
