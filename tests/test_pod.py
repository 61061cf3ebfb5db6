"""Pods: the same script on each host gives the same results as on one host, bit for bit."""

import re
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from pods import HERE, Pod
from torch.utils._pytree import tree_flatten

from tpufit.data.sampling import select_shard_rows

# Hosts, cores of each, and True if the cores aren't adjacent.
SMALL = (2, 2, False)
SHAPES = [
    pytest.param(SMALL, marks=pytest.mark.slow, id="2x2"),
    *(
        pytest.param(shape, marks=pytest.mark.soak, id=f"{shape[0]}x{shape[1]}{'-interleaved' * shape[2]}")
        for shape in ((4, 2, False), (2, 4, True))  # more hosts, and more cores that aren't adjacent
    ),
    # As torchrun starts them.
    pytest.param((4, 1, False), marks=[pytest.mark.soak, pytest.mark.runtime("torch_tpu")], id="4x1"),
]
SCENARIOS = re.findall(r"@scenario\ndef (\w+)", (HERE / "pod" / "scenarios.py").read_text())


@cache
def results(hosts, cores, interleaved=False):
    """Return the results of each host of a pod."""
    folder = Path(mkdtemp(prefix="pod-"))
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import pod.scenarios"
    ended = Pod(hosts, cores, folder, interleaved).run(code, timeout=540)
    assert [host.code for host in ended] == [0] * hosts, "\n".join(host.err for host in ended)
    assert not any(
        "/xla/" in host.out + host.err for host in ended
    )  # XLA's notes begin with the name of their source file
    return [torch.load(folder / f"results{host}.pt", weights_only=False) for host in range(hosts)]


def assert_equal(ours, theirs):
    (ours, form), (theirs, other_form) = tree_flatten(ours), tree_flatten(theirs)
    assert form == other_form
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, torch.Tensor | np.ndarray):
            torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=0, atol=0)
        else:
            assert one == other


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_pod_is_equal_to_one_host(shape, name):
    hosts, cores, interleaved = shape
    (one,) = results(1, hosts * cores)
    for number, host in enumerate(results(hosts, cores, interleaved)):
        if name == "predictions" and number:  # all rows belong to process 0
            assert host["whole"] == [True]
        else:
            assert_equal(host["results"][name], one["results"][name])


@pytest.mark.parametrize("shape", SHAPES)
def test_each_host_predicts_its_own_rows(shape):
    hosts, cores, interleaved = shape
    (one,) = results(1, hosts * cores)
    rows = one["results"]["predictions"]
    size = 4 * hosts * cores
    for host in results(hosts, cores, interleaved):
        mine = [
            first + select_shard_rows(host["shards"], hosts * cores, min(size, len(rows) - first))
            for first in range(0, len(rows), size)
        ]
        assert_equal(host["own"][0], rows[np.concatenate(mine)])


@pytest.mark.parametrize("shape", SHAPES)
def test_each_host_reads_only_its_own_rows(shape):
    read = [host["reads"][0] for host in results(*shape)]
    assert sorted(i for rows in read for i in rows) == list(range(75))
