"""CachedDataset returns the source's samples, in every mode, from any number of workers, in any order."""

import os
import pickle
import random
import sys
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cache_sources
import numpy as np
import processes
import pytest
import torch
from cache_sources import FILES_OF_16, NOISE_OF_16, Everything, Rows, expected, noise
from PIL import Image
from torch.testing import assert_close
from torch.utils.data import DataLoader, Subset, TensorDataset

from tpufit.data.__main__ import main
from tpufit.data.cache import CachedDataset
from tpufit.errors import ArgumentError, CacheError, DataError, UnknownNameError

TESTS = Path(__file__).parent
MODES = ["mmap", "ram"]


def exactly(actual, wanted):
    assert_close(actual, wanted, rtol=0, atol=0)


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """A complete cache of `Everything`, in three files of two blocks."""
    folder = tmp_path_factory.mktemp("everything")
    data = CachedDataset(Everything(), folder, shard_mb=0.8, workers=0)
    data.warm_up(progress=False)
    return folder


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_a_cached_batch_equals_the_sources_samples(everything, mode, ordered):
    data = CachedDataset.open(everything, mode=mode, ordered=ordered)
    source, indices = Everything(), np.random.default_rng(0).integers(0, 120, 50)  # some indices are repeated
    batch = data.get_batch(indices)
    exactly(batch, expected([source[i] for i in (indices if ordered else np.sort(indices)).tolist()]))
    assert batch["image"].dtype == torch.uint8 and batch["pair"][0].dtype == torch.bfloat16
    exactly(data.get_batch([7]), expected([source[7]]))
    assert [len(leaf) for leaf in data.get_batch([])["pair"]] == [0, 1]


def test_the_cache_has_several_files_of_several_blocks(everything):
    manifest = CachedDataset.open(everything)._manifest
    assert manifest.files > 2 and manifest.rows_per_block < 100 and manifest.rows % manifest.rows_per_file


@pytest.mark.parametrize("mode", MODES)
def test_samples_one_by_one(everything, mode):
    data = CachedDataset.open(everything, mode=mode)
    source = Everything()
    assert len(data) == 120
    for index in (0, 59, 119):
        exactly(data[index], {key: value[0] for key, value in one(source[index]).items()})
    numbers = DataLoader(Subset(data, range(10, 20)), batch_size=4, shuffle=False)
    assert [batch["label"].tolist() for batch in numbers] == [[10, 11, 12, 13], [14, 15, 16, 17], [18, 19]]


def one(sample):
    """Return a sample as a batch of one row; its nested sample is compared leaf by leaf."""
    batch = expected([sample])
    batch["pair"] = [(batch["pair"][0][0], [batch["pair"][1][0][0]])]
    return batch


@pytest.mark.parametrize("mode", MODES)
def test_batches_are_copies(everything, mode):
    data = CachedDataset.open(everything, mode=mode)
    for read in (lambda: data[3]["image"], lambda: data.get_batch([3])["image"][0]):
        read().zero_()
        exactly(read(), torch.tensor(Everything()[3]["image"]))


@pytest.mark.parametrize("mode", MODES)
def test_unreferenced_memory_is_reused(everything, mode):
    data = CachedDataset.open(everything, mode=mode)
    images = torch.stack([torch.tensor(Everything()[i]["image"]) for i in range(120)])
    orders = [np.random.default_rng(i).permutation(120)[: 60 + i] for i in range(12)]  # more than the most that is kept
    held = [data.get_batch(order)["image"] for order in orders]
    pieces = [held[0][5, 1], held[1].numpy()[7:9], held[2].view(torch.int16)]
    copies = [torch.as_tensor(piece).clone() for piece in pieces]
    for order, batch in zip(orders, held, strict=True):
        exactly(batch, images[order])
    places = {batch.data_ptr() for batch in held}
    del held, batch
    for _ in range(3):
        again = [data.get_batch(order)["image"] for order in orders]
        for order, batch in zip(orders, again, strict=True):
            exactly(batch, images[order])
    assert places & {batch.data_ptr() for batch in again}
    for piece, copy in zip(pieces, copies, strict=True):
        exactly(torch.as_tensor(piece), copy)


@pytest.mark.parametrize("mode", MODES)
def test_several_threads_may_read(everything, mode):
    data = CachedDataset.open(everything, mode=mode)
    images = torch.stack([torch.tensor(Everything()[i]["image"]) for i in range(120)])

    def read(seed):
        orders = [np.random.default_rng([seed, i]).permutation(120)[:64] for i in range(10)]
        return all(torch.equal(data.get_batch(order)["image"], images[order]) for order in orders)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(read, range(8)))


def test_iteration_ends(tmp_path):
    data = CachedDataset(Rows(3), tmp_path, workers=0)
    assert [index for _, index in data] == [0, 1, 2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("index", [-1, 120, 10**12])
def test_an_index_out_of_range(everything, mode, index):
    data = CachedDataset.open(everything, mode=mode)
    with pytest.raises(IndexError, match=rf"no sample {index}: the cache has 120, from 0 to 119"):
        data.get_batch(np.array([0, index, 5]))
    with pytest.raises(IndexError, match="no sample"):
        data[index]


@pytest.mark.parametrize("indices", [[[1, 2]], [1.0], np.array([True, False]), 3])
def test_indices_are_one_dimensional_integers(everything, indices):
    with pytest.raises(ArgumentError, match="whole numbers in one dimension"):
        CachedDataset.open(everything).get_batch(indices)


def test_copies_are_variants_by_epoch(tmp_path):
    data = CachedDataset(Rows(40), tmp_path, noise, copies=3, shard_mb=NOISE_OF_16, workers=0)
    data.warm_up(progress=False)
    assert data.info().rows == len(data) == 40 and data.info().files > 1
    epochs = [data.get_batch(np.arange(40), epoch) for epoch in range(6)]
    for epoch in range(3):
        exactly(epochs[epoch], epochs[epoch + 3])
        exactly(epochs[epoch][0], torch.arange(40))
    values = torch.cat([torch.cat([a[:, None], b, c], 1) for _, a, b, c in epochs[:3]])
    assert len(values.unique(dim=0)) == 120 and len(values.unique()) == values.numel()
    data.set_epoch(4)
    exactly(data[5], tuple(leaf[5] for leaf in epochs[1]))


def test_random_numbers_depend_on_the_seed(tmp_path):
    made = {}
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        random.seed(folder)
        torch.manual_seed(ord(folder))
        made[folder] = CachedDataset(Rows(4), tmp_path / folder, noise, seed=seed, workers=0).get_batch([0, 1, 2, 3])
    exactly(made["a"], made["b"])
    assert not torch.equal(made["a"][3], made["c"][3])


def test_the_process_keeps_its_random_state_and_threads(tmp_path):
    def draw():
        return random.random(), np.random.rand(), torch.rand(()).item(), torch.get_num_threads()

    torch.set_num_threads(2)
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    before = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    CachedDataset(Rows(4), tmp_path, noise, workers=0).warm_up(progress=False)
    assert draw() == before


@pytest.mark.soak
def test_files_dont_depend_on_the_number_of_workers(tmp_path):
    contents = []
    for workers in (0, 1, 2):
        folder = tmp_path / str(workers)
        data = CachedDataset(Rows(), folder, noise, copies=2, shard_mb=NOISE_OF_16, workers=workers)
        data.warm_up(progress=False)
        assert data.info().files >= 4
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert contents[0] == contents[1] == contents[2]
    assert sorted(contents[0])[:3] == [".lock", "meta.json", f"shard-00000-of-{data.info().files:05d}.safetensors"]


def test_workers_load_no_torch_xla(tmp_path):
    data = CachedDataset(Rows(), tmp_path, cache_sources.with_modules, workers=1)
    data.warm_up(progress=False)
    assert not data.get_batch(np.arange(64))[1].any()


def test_the_first_read_warms_the_cache_up(tmp_path, capsys):
    data = CachedDataset(Rows(), tmp_path, shard_mb=FILES_OF_16, workers=0)
    assert capsys.readouterr().out == "" and data.info().missing == 4
    assert data[5][1] == 5
    line = f"{tmp_path}: making 4 of 4 files of samples before the first can be read."
    assert capsys.readouterr().out.startswith(line)
    assert data[6][1] == 6 and data.info().missing == 0
    data.warm_up()  # a second warm-up does nothing
    assert capsys.readouterr().out == ""


def test_the_bar_is_one_line_without_a_terminal(tmp_path, capsys):
    CachedDataset(Rows(), tmp_path, workers=0).warm_up()
    [line] = capsys.readouterr().out.strip().splitlines()
    assert "64/64 samples" in line


def test_a_cached_dataset_has_a_repr_and_info(tmp_path):
    data = CachedDataset(Rows(), tmp_path / "cache", device_transform=abs, shard_mb=FILES_OF_16, workers=0)
    info = data.info()
    assert (info.rows, info.copies, info.files, info.missing) == (64, 1, 4, 4)
    assert (info.bytes, info.path) == (64 * 1032, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()  # nothing is written before the first data
    data.warm_up(progress=False)
    opened = CachedDataset.open(tmp_path / "cache", device_transform=abs)
    assert opened.info() == data.info() and opened.info().missing == 0
    assert data.device_transform is opened.device_transform is abs
    assert (data.source.rows, opened.source) == (64, None)
    assert repr(data) == f"CachedDataset(64 samples, '{tmp_path}/cache')"


def test_small_sets_have_enough_files_for_all_workers(tmp_path):
    rows = TensorDataset(torch.zeros(20_000, 2))
    assert CachedDataset(rows, tmp_path).info().files == 16
    assert CachedDataset(rows, tmp_path, shard_mb=0.001).info().files > 100
    assert CachedDataset(Rows(), tmp_path).info().files == 1


def test_another_shard_size_keeps_existing_files(tmp_path):
    CachedDataset(Rows(), tmp_path, shard_mb=FILES_OF_16, workers=0).warm_up(progress=False)
    assert CachedDataset(Rows(), tmp_path, shard_mb=256).info().files == 4


def test_a_cached_dataset_can_be_pickled(everything):
    data = CachedDataset.open(everything)
    data[0]
    exactly(pickle.loads(pickle.dumps(data)).get_batch([1, 2]), data.get_batch([1, 2]))


def test_opening_a_folder_without_a_cache(tmp_path):
    with pytest.raises(CacheError, match="has no cache: there is no meta.json"):
        CachedDataset.open(tmp_path)


def test_opening_an_unfinished_cache(tmp_path):
    CachedDataset(Rows(), tmp_path, shard_mb=FILES_OF_16, workers=0).warm_up(progress=False)
    (tmp_path / "shard-00002-of-00004.safetensors").unlink()
    with pytest.raises(CacheError, match=r"1 of the 4 files in .* are missing, such as shard-00002-of-00004"):
        CachedDataset.open(tmp_path)


def test_an_opened_cache_cannot_be_warmed_up(everything):
    with pytest.raises(CacheError, match="opened without its source"):
        CachedDataset.open(everything).warm_up()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"copies": 0}, "copies must be a whole number of at least 1, got 0"),
        ({"workers": -1}, "workers must be a whole number of at least 0"),
        ({"workers": "many"}, "workers must be a whole number"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"shard_mb": 0}, "shard_mb must be a positive number"),
        ({"mode": "mnap"}, "unknown mode 'mnap': did you mean 'mmap'"),
        ({"source": iter([])}, "map-style dataset"),
    ],
)
def test_wrong_arguments_of_cached_dataset_are_errors(tmp_path, arguments, message):
    with pytest.raises(ArgumentError, match=message):
        CachedDataset(**{"source": Rows(), "cache_dir": tmp_path, **arguments})
    with pytest.raises(UnknownNameError):
        CachedDataset.open(tmp_path, mode="disk")


def test_an_empty_source(tmp_path):
    with pytest.raises(DataError, match="source is empty"):
        CachedDataset([], tmp_path)


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (Image.new("RGB", (4, 4)), r"sample\[0\] of sample 0 is a PIL.Image.Image.* array in `transform`"),
        ("a word", r"is a builtins.str, which a cache can't store: return a tensor"),
        (None, "NoneType"),
        (Point(1, 2), "Point"),
        ({1: 2}, "builtins.dict.* strings for keys"),
        (np.array(["a"]), "numpy.ndarray of <U1"),
        (np.zeros(2, np.longdouble), "numpy.ndarray of float128"),
        (torch.eye(3).to_sparse(), "torch.Tensor of torch.float32"),
        (1j, "builtins.complex"),
        (torch.zeros(2, dtype=torch.complex128), "torch.Tensor of torch.complex128"),
    ],
)
def test_unsupported_samples(tmp_path, leaf, message):
    with pytest.raises(DataError, match=message):
        CachedDataset([(leaf, 1)], tmp_path)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (torch.zeros(3, 3), r"sample\['x'\] of sample 2 is float32 \(3, 3\), but of sample 0 float32 \(2, 3\)"),
        (torch.zeros(2, 3, dtype=torch.int64), r"sample\['x'\] of sample 2 is int64 \(2, 3\), but of sample 0 float32"),
        ([torch.zeros(2, 3)], r"sample 2 has the structure \{'x': \[\"sample\['x'\]\[0\]\"\]\}, but sample 0 has"),
    ],
)
def test_all_samples_are_alike(tmp_path, odd, message):
    plain = torch.zeros(2, 3)
    data = CachedDataset([{"x": x} for x in (plain, plain, odd, plain, plain)], tmp_path, workers=0)
    with pytest.raises(DataError, match=message):
        data.warm_up(progress=False)


def test_the_order_of_keys_does_not_matter(tmp_path):
    data = CachedDataset([{"a": 1, "b": 2}, {"b": 4, "a": 3}], tmp_path, workers=0)
    assert {name: column.tolist() for name, column in data.get_batch([0, 1]).items()} == {"a": [1, 3], "b": [2, 4]}


def test_arrays_of_any_strides_and_byte_order(tmp_path):
    array = np.arange(24, dtype=">i4").reshape(2, 3, 4)
    data = CachedDataset([array[:, ::-1, ::2], array[:, ::-1, ::2] + 1], tmp_path, workers=0)
    exactly(data.get_batch([1])[0], torch.from_numpy(array.astype("i4")[:, ::-1, ::2] + 1))


def test_a_single_tensor_and_views_and_gradients(tmp_path):
    rows = torch.arange(24.0).view(4, 6).requires_grad_()
    data = CachedDataset([row.view(2, 3).T for row in rows], tmp_path, workers=0)
    exactly(data.get_batch([2, 0]), torch.stack([row.view(2, 3).T for row in rows])[[2, 0]].detach())


# The command line.


@pytest.mark.soak
def test_the_command_line(tmp_path):
    (tmp_path / "project.py").write_text(
        "from cache_sources import NOISE_OF_16, Rows, noise\n"
        "from tpufit.data.cache import CachedDataset\n"
        "class data:\n"
        "    train = CachedDataset(Rows(), 'cache', noise, shard_mb=NOISE_OF_16)\n"
    )
    command = [sys.executable, "-m", "tpufit.data", "warm", "project:data.train"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [TESTS.parent, TESTS]))}
    for said in ("64/64 samples", ""):  # the second time all files exist
        result = processes.run(command, timeout=120, cwd=tmp_path, env=environment)
        assert (result.returncode, result.stderr) == (0, "")
        assert said in result.stdout and bool(said) == bool(result.stdout)
    assert CachedDataset.open(tmp_path / "cache").verify() == []


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("json", SystemExit, "expected module:dataset, e.g. my_project.data:train, got 'json'"),
        ("json:dumps", SystemExit, "json:dumps must be a tpufit.data.CachedDataset, got function"),
        ("json:nothing", AttributeError, "has no attribute 'nothing'"),
        ("nowhere:data", ModuleNotFoundError, "No module named 'nowhere'"),
    ],
)
def test_errors_of_the_command_line(capsys, name, error, message):
    with pytest.raises(error) as raised:
        main(["warm", name])
    assert message in capsys.readouterr().err + str(raised.value)
