"""Faults on a cache: kills, full disks, damage, changes, concurrent writers. No fault gives wrong samples."""

import errno
import fcntl
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import processes
import pytest
import safetensors.torch
import torch
from cache_sources import FILES_OF_16, DieAt, FailAt, FillDiskAt, Rows, Unreadable, noise, note_process, slow

from tpufit.data.cache import CachedDataset
from tpufit.errors import (
    ArgumentError,
    CacheBusyError,
    CacheDamagedError,
    CacheDiskFullError,
    CacheError,
    CacheMismatchError,
    DataError,
)

# Each test kills or starves processes.
pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent
IMPORTS = {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
MODES = ["mmap", "ram"]
SOON = 120.0  # the time limit, in seconds, for something that takes a few


def rows(folder, transform=None, count=64, workers=0, **options):
    """A cache of `Rows` in files of 16."""
    return CachedDataset(Rows(count), folder, transform, shard_mb=FILES_OF_16, workers=workers, **options)


def warmed(folder, *arguments, **options):
    data = rows(folder, *arguments, **options)
    data.warm_up(progress=False)
    return data


def assert_right(data):
    """Check that all samples equal the source's."""
    values, labels = data.get_batch(np.arange(len(data)))
    assert labels.tolist() == list(range(len(data)))
    assert torch.equal(values, labels[:, None].int().expand(-1, 256))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def finished(folder):
    """Return when each complete file was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("shard-*")}


def becomes(condition):
    deadline = time.monotonic() + SOON
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@contextmanager
def running(folder, code, **environment):
    """Start a new Python that runs code."""
    with (
        open(folder / "output", "wb") as output,
        processes.process_group(
            [sys.executable, "-c", code],
            cwd=folder,
            env={**os.environ, **IMPORTS, **environment},
            stdout=output,
            stderr=output,
        ) as process,
    ):
        yield process


# Kills.

WARM_UP = """
from cache_sources import *
from tpufit.data.cache import CachedDataset
data = CachedDataset(Rows({count}), "cache", note_process, shard_mb=FILES_OF_16, workers=2)
data.warm_up(progress=False)
"""


@pytest.fixture
def pids(tmp_path, monkeypatch):
    """The folder in which processes that create samples write their ids."""
    folder = tmp_path / "pids"
    folder.mkdir()
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("PIDS", str(tmp_path / "mine"))
    return folder


@contextmanager
def at_work(folder, pids, count):
    """Start a warm-up with two workers, which can't end before `let_end`; yield once they create samples.

    At the end of the block all have ended.
    """
    for path in pids.iterdir():
        path.unlink()
    pids.with_suffix(".hold").touch()
    with running(folder, WARM_UP.format(count=count), PIDS=str(pids)) as process:
        assert becomes(lambda: workers_of(process, pids)), (folder / "output").read_text()
        yield process
        let_end(pids)
        assert becomes(lambda: not any(map(alive, workers_of(process, pids))))


def let_end(pids):
    pids.with_suffix(".hold").unlink(missing_ok=True)


def workers_of(process, pids):
    return {int(path.name) for path in pids.iterdir()} - {process.pid}


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between opening and reading
        return False


def kill_and_resume(folder, pids, times, count, seed):
    """Kill a warm-up at random moments, check the files each time, and let the last warm-up finish."""
    cache, moments = folder / "cache", random.Random(seed)
    for _ in range(times):
        before = finished(cache)
        with at_work(folder, pids, count) as process:
            time.sleep(moments.uniform(0, 0.2))
            os.kill(process.pid, signal.SIGKILL)  # only this process: its workers must end by themselves
        assert before.items() <= finished(cache).items()
        left = rows(cache, note_process, count)
        assert left.verify() == []
        assert left.info().missing == count // 16 - len(finished(cache)) > 0
    with at_work(folder, pids, count) as process:
        let_end(pids)
        assert process.wait(timeout=SOON) == 0, (folder / "output").read_text()
    data = CachedDataset.open(cache)
    assert data.verify() == []
    assert_right(data)
    assert {path.name for path in cache.iterdir()} - finished(cache).keys() == {"meta.json", ".lock"}


@pytest.mark.soak
def test_killed_at_any_moment(tmp_path, pids):
    kill_and_resume(tmp_path, pids, times=3, count=480, seed=0)


@pytest.mark.soak
def test_killed_at_twenty_moments(tmp_path, pids):
    kill_and_resume(tmp_path, pids, times=20, count=2400, seed=1)


def test_killed_while_writing(tmp_path, run_python):
    code = """
        import os, signal, safetensors.torch
        from cache_sources import *
        from tpufit.data.cache import CachedDataset
        real = safetensors.torch.save_file
        def half(tensors, path, metadata):
            real(tensors, path, metadata)
            if "00002-of" in str(path):
                os.truncate(path, os.path.getsize(path) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
        safetensors.torch.save_file = half
        CachedDataset(Rows(), "cache", shard_mb=FILES_OF_16, workers=0).warm_up()
    """
    assert run_python(code, env=IMPORTS).returncode == -signal.SIGKILL
    cache = tmp_path / "cache"
    before = finished(cache)
    assert len(before) == 2 and list(cache.glob(".*.tmp-*"))
    assert_right(warmed(cache))
    assert before.items() <= finished(cache).items() and not list(cache.glob(".*.tmp-*"))


@pytest.mark.soak
def test_interrupted_from_the_keyboard(tmp_path, pids):
    with at_work(tmp_path, pids, count=480) as process:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(timeout=SOON) == -signal.SIGINT
    assert (tmp_path / "output").read_text().rstrip().endswith("KeyboardInterrupt")
    assert not list((tmp_path / "cache").glob(".*.tmp-*"))
    assert rows(tmp_path / "cache", note_process, 480).verify() == []


# Two at once.


@pytest.mark.soak
def test_two_warm_ups_at_once(tmp_path, pids):
    with at_work(tmp_path, pids, count=800) as process:
        mine = rows(tmp_path / "cache", note_process, 800)
        for use in (lambda: mine.warm_up(progress=False), lambda: mine[0]):
            with pytest.raises(CacheBusyError, match="another warm-up is running in"):
                use()
        let_end(pids)
        assert process.wait(timeout=SOON) == 0, (tmp_path / "output").read_text()
    assert_right(mine)


def test_a_different_warm_up_finished_first(tmp_path):
    mine = rows(tmp_path, version="mine")
    warmed(tmp_path, version="theirs")
    with pytest.raises(CacheMismatchError, match="a cache of another origin"):
        rows(tmp_path, version="mine")
    mine_before = contents(tmp_path)
    (tmp_path / "shard-00000-of-00004.safetensors").unlink()
    with pytest.raises(CacheMismatchError, match="version: 'theirs' then, 'mine' now"):
        mine.warm_up(progress=False)
    assert contents(tmp_path).items() < mine_before.items()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="has no locks .*make sure that no other process is writing"):
        assert_right(warmed(tmp_path))


# No room.


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 2 MiB if this process may mount one, else None."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    yield folder if mounted else None
    if mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_a_disk_that_fills_up(tmp_path, small_disk, monkeypatch, workers):
    ballast = (small_disk or tmp_path) / "ballast"
    if small_disk is None:  # otherwise the file system's error is simulated
        workers, real = 0, safetensors.torch.save_file

        def save(tensors, path, metadata):
            if ballast.exists() and ballast.stat().st_size:
                raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")
            real(tensors, path, metadata)

        monkeypatch.setattr(safetensors.torch, "save_file", save)
    data = rows(ballast.with_name("cache"), FillDiskAt(40, ballast), workers=workers)
    with pytest.raises(CacheDiskFullError, match="no room in .* Make room and call warm_up") as raised:
        data.warm_up(progress=False)
    kept, error = finished(data.info().path), raised.value
    assert 1 <= error.done == len(kept) < error.files == 4
    assert error.need == (4 - len(kept)) * 16 * 1032
    assert error.free < error.need or small_disk is None
    assert not list(data.info().path.glob(".*.tmp-*"))
    os.truncate(ballast, 0)
    assert_right(rows(data.info().path, FillDiskAt(40, ballast)))
    assert kept.items() <= finished(data.info().path).items()


def test_a_full_disk_from_the_beginning(tmp_path, monkeypatch):
    data = rows(tmp_path)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(
        CacheDiskFullError, match=r"66,048 bytes are needed and 1,000 are free\. 0 of 4 files"
    ) as raised:
        data.warm_up(progress=False)
    assert (raised.value.need, raised.value.free) == (64 * 1032, 1000)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


# Damaged files.


@pytest.mark.parametrize("size", [-1, 0.5, 100, 5, 0])
@pytest.mark.parametrize("mode", MODES)
def test_a_truncated_file(tmp_path, mode, size):
    warmed(tmp_path)
    before = contents(tmp_path)
    path = tmp_path / "shard-00002-of-00004.safetensors"
    whole = path.stat().st_size
    os.truncate(path, {-1: whole - 1, 0.5: whole // 2}.get(size, size))
    with pytest.raises(CacheDamagedError, match=r"shard-00002-of-00004.safetensors is damaged: .*repair=True"):
        CachedDataset.open(tmp_path, mode=mode)
    data = rows(tmp_path, mode=mode)
    with pytest.raises(CacheDamagedError, match=r"shard-00002-of-00004"):
        data[0]
    data.warm_up(progress=False)  # creates only the missing file
    assert data.verify() == ["shard-00002-of-00004.safetensors"]
    data.warm_up(progress=False, repair=True)
    assert data.verify() == [] and contents(tmp_path) == before
    assert_right(data)


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("mode", MODES)
def test_a_flipped_bit_among_the_rows(tmp_path, mode):
    warmed(tmp_path)
    path = tmp_path / "shard-00001-of-00004.safetensors"
    data_begins = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    for bit in random.Random(0).sample(range(8 * data_begins, 8 * path.stat().st_size), 100):
        flip(path, bit)
        data = CachedDataset.open(tmp_path, mode=mode) if mode != "ram" else rows(tmp_path, mode=mode)
        with pytest.raises(CacheDamagedError, match=r"shard-00001.* of its rows \d+ to \d+ has changed"):
            data.get_batch(range(64))
        flip(path, bit)
    assert_right(CachedDataset.open(tmp_path, mode=mode))


def test_files_are_checked_when_first_read(tmp_path):
    warmed(tmp_path)
    flip(tmp_path / "shard-00003-of-00004.safetensors", -8)  # in the last byte
    data = CachedDataset.open(tmp_path)
    assert data.get_batch(range(48))[1].tolist() == list(range(48))
    with pytest.raises(CacheDamagedError, match="shard-00003"):
        data[48]
    assert data.verify() == ["shard-00003-of-00004.safetensors"]


@pytest.mark.parametrize("name", ["shard-00001-of-00002.safetensors", "meta.json"])
def test_a_flipped_bit_of_a_header(tmp_path, name):
    warmed(tmp_path, count=32)
    path = tmp_path / name
    good = path.read_bytes()
    bits = 8 * len(good) if name == "meta.json" else 8 * (8 + int.from_bytes(good[:8], "little"))
    unnoticed = 0
    for bit in range(0, bits, 7):
        flip(path, bit)
        try:
            data = CachedDataset.open(tmp_path)
        except CacheError:
            pass
        else:
            unnoticed += 1
            assert_right(data)
        path.write_bytes(good)
    assert unnoticed < bits / 700


def test_swapped_files(tmp_path):
    warmed(tmp_path / "a"), warmed(tmp_path / "b", version="2")
    first, second = (tmp_path / "a" / f"shard-0000{i}-of-00004.safetensors" for i in (0, 1))
    for path, other in ((first, second), (second, tmp_path / "b" / second.name)):
        good = path.read_bytes()
        path.write_bytes(other.read_bytes())
        with pytest.raises(CacheDamagedError, match="its header isn't the one written under this name"):
            CachedDataset.open(tmp_path / "a")
        path.write_bytes(good)
    assert_right(CachedDataset.open(tmp_path / "a"))


class Canary:
    def __reduce__(self):
        return (os.mkdir, ("hatched",))


@pytest.mark.parametrize("name", ["shard-00001-of-00004.safetensors", "meta.json"])
def test_nothing_is_unpickled(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    warmed(tmp_path)
    (tmp_path / name).write_bytes(pickle.dumps(Canary()))
    with pytest.raises(CacheDamagedError, match="is damaged"):
        CachedDataset.open(tmp_path)
    assert not (tmp_path / "hatched").exists()


def test_a_later_cache_format(tmp_path):
    warmed(tmp_path)
    path = tmp_path / "meta.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CacheError, match="a format that this version of tpufit doesn't know"):
        CachedDataset.open(tmp_path)


ABSURD = {
    "a list": "[]",
    "nested": "[" * 10_000 + "]" * 10_000,
    "no UTF-8": b"\xff\xfe\x00{}",
    "no rows": lambda m: m.pop("rows"),
    "rows of text": lambda m: m.update(rows="64"),
    "rows below zero": lambda m: m.update(rows=-3),
    "no rows in a file": lambda m: m.update(rows_per_file=0),
    "an unknown dtype": lambda m: m["fields"][0].__setitem__(1, "nothing"),
    "a dtype that is a function": lambda m: m["fields"][0].__setitem__(1, "ones"),
    "a shape of text": lambda m: m["fields"][0].__setitem__(2, ["a"]),
    "fields of numbers": lambda m: m.update(fields=[1, 2]),
    "a structure of other leaves": lambda m: m.update(structure=["tuple", "sample[7]"]),
    "something more": lambda m: m.update(more=1),
}


@pytest.mark.parametrize("name", ABSURD)
def test_an_absurd_meta_json_is_a_damaged_cache(tmp_path, name):
    warmed(tmp_path, count=16)
    path = tmp_path / "meta.json"
    text = ABSURD[name]
    if callable(text):
        plain = json.loads(path.read_text())
        del plain["fingerprint"], plain["format"]
        text(plain)
        fingerprint = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
        text = json.dumps({"format": 1, "fingerprint": fingerprint, **plain})
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for use in (CachedDataset.open, rows):
        with pytest.raises(CacheDamagedError, match=r"meta\.json .*Copy an intact folder again"):
            use(tmp_path)


def test_the_users_files_stay(tmp_path):
    names = [".notes.tmp-7", ".meta.json.tmp-mine", ".shard-1.safetensors.tmp-7"]
    for name in names:
        (tmp_path / name).write_text("years of work")
    (tmp_path / ".meta.json.tmp-77").write_text("left by a killed process")
    warmed(tmp_path, count=16)
    assert sorted(path.name for path in tmp_path.glob(".*.tmp-*")) == sorted(names)


def test_meta_json_is_missing(tmp_path):
    data = warmed(tmp_path)
    before = contents(tmp_path)
    (tmp_path / "meta.json").unlink()
    with pytest.raises(CacheError, match="has no cache"):
        CachedDataset.open(tmp_path)
    data.warm_up(progress=False)
    assert contents(tmp_path) == before
    (tmp_path / "meta.json").unlink()
    with pytest.raises(CacheDamagedError, match="its header isn't the one written under this name"):
        rows(tmp_path, version="2")[0]


# Something has changed.


class OtherRows(Rows):
    pass


class Changed(Rows):
    """The same class by name, with another value."""

    def __getitem__(self, index):
        values, label = super().__getitem__(index)
        return values, label + (index == 63)


Changed.__qualname__ = "Rows"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transform": noise}, r"transform .*: 'slow \w+' then, 'noise \w+' now; the structure of a sample"),
        ({"transform": FailAt(99)}, r"transform .* 'FailAt \w+' now"),
        ({"source": Rows(65)}, "the number of samples: 64 then, 65 now"),
        ({"source": OtherRows(64)}, r"source .*: 'Rows \w+' then, 'OtherRows \w+' now"),
        ({"source": Changed(64)}, r"the samples themselves: the first, the middle or the last"),
        ({"version": "2"}, "version: '1' then, '2' now"),
        ({"seed": 1}, "seed: 0 then, 1 now"),
        ({"copies": 2}, "copies: 1 then, 2 now"),
    ],
)
def test_a_change_is_named(tmp_path, change, message):
    arguments = {"source": Rows(), "cache_dir": tmp_path, "transform": slow, "workers": 0}
    CachedDataset(**arguments).warm_up(progress=False)
    before = contents(tmp_path)
    with pytest.raises(CacheMismatchError, match=message):
        CachedDataset(**arguments | change)
    assert contents(tmp_path) == before  # neither read nor rebuilt
    assert_right(CachedDataset(**arguments))
    assert len(CachedDataset(**arguments | change | {"cache_dir": tmp_path / "other"}).get_batch([0])) >= 2


def test_changes_without_effect_on_samples_are_allowed(tmp_path):
    warmed(tmp_path)
    other = CachedDataset(Rows(), tmp_path, device_transform=abs, shard_mb=1, workers="auto", mode="ram", ordered=False)
    assert_right(other)


def unrepeatable(sample):
    return sample, os.urandom(1)[0]


def test_a_transform_with_its_own_random_generator(tmp_path):
    arguments = {"source": [0] * 40, "cache_dir": tmp_path, "transform": unrepeatable, "workers": 0}
    with pytest.warns(UserWarning, match="a sample differs when it is made twice"):
        data = CachedDataset(**arguments)
    data.warm_up(progress=False)
    again = CachedDataset(**arguments)  # the change can't be detected, so no change is reported
    assert torch.equal(again.get_batch(range(40))[1], data.get_batch(range(40))[1])


# Nothing may be written.


def test_a_read_only_folder(run_python):
    code = """
        import ctypes, os, sys
        from cache_sources import *
        from tpufit.data.cache import CachedDataset
        from tpufit.errors import CacheError
        # Root may write anywhere, unless it gives up its capabilities. It still reads its own files: another user
        # can't read a checkout in a private folder, and so would compute another fingerprint.
        version, none = (ctypes.c_uint32 * 2)(0x20080522), (ctypes.c_uint32 * 6)()
        assert ctypes.CDLL(None).capset(version, none) == 0
        for name in ("whole", "partial"):
            path = os.path.join(sys.argv[1], name)
            data = CachedDataset(Rows(), path, shard_mb=FILES_OF_16, workers=0)
            try:
                data.warm_up()
                print(data[33][1].item(), CachedDataset.open(path).get_batch([63])[1].item(), data.verify())
            except CacheError as error:
                print(type(error).__name__, str(error).replace(path, "PATH"))
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in ("whole", "partial"):
            warmed(Path(folder, name))
        Path(folder, "partial", "shard-00001-of-00004.safetensors").unlink()
        for path in Path(folder).rglob("*"):
            path.chmod(0o555 if path.is_dir() else 0o444)
        result = run_python(code.replace("sys.argv[1]", repr(folder)), env=IMPORTS)
        for path in Path(folder).iterdir():
            path.chmod(0o755)
    assert result.returncode == 0, result.stderr
    whole, partial = result.stdout.splitlines()
    assert whole == "33 63 []"
    assert partial.startswith("CacheError PATH can't be written to (Permission denied). Make the cache elsewhere")


# What the source, the transform and the workers can do wrong.


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_raises(tmp_path, workers):
    data = rows(tmp_path, FailAt(40), workers=workers)
    with pytest.raises(DataError, match=r"sample 40 could not be made: KeyError: 'no such label'") as raised:
        data.warm_up(progress=False)
    cause = raised.value.__cause__
    assert isinstance(cause, KeyError) if not workers else 'raise KeyError("no such label")' in str(cause)
    assert len(finished(tmp_path)) >= 1 and data.verify() == []


def test_a_worker_that_is_killed(tmp_path):
    data = rows(tmp_path, DieAt(40), workers=1)
    message = r"worker 0 \(process \d+\) was killed by SIGKILL, as the kernel does .* it made shard-00002-of-00004"
    with pytest.raises(CacheError, match=message):
        data.warm_up(progress=False)
    assert len(finished(tmp_path)) >= 1 and data.verify() == []
    assert not list(tmp_path.glob(".*.tmp-*"))


@pytest.mark.soak
def test_a_source_larger_than_a_pipe(tmp_path):
    source = [torch.full((10_000,), i) for i in range(40)]
    data = CachedDataset(source, tmp_path, shard_mb=0.8, workers=1)
    data.warm_up(progress=False)
    assert data.info().files == 4
    assert torch.equal(data.get_batch(range(40)), torch.stack(source))


def test_an_object_that_workers_cannot_unpickle(tmp_path):
    data = rows(tmp_path, Unreadable(), workers=1)
    with pytest.raises(CacheError, match="ImportError: this worker lacks something") as raised:
        data.warm_up(progress=False)
    assert "Traceback" in str(raised.value.__cause__)


def test_an_object_that_cannot_be_pickled(tmp_path, monkeypatch):
    def local(sample):
        return sample

    with pytest.raises(
        ArgumentError, match=r"workers=2: .* can't be pickled \(.*\)\. Define their parts in a module, .*workers=0"
    ):
        rows(tmp_path / "a", lambda sample: sample, workers=2).warm_up(progress=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.warns(UserWarning, match="one process makes all samples: .* can't be pickled"):
        assert_right(warmed(tmp_path / "b", local, workers="auto"))


def test_classes_from_a_notebook(run_python):
    code = """
        from cache_sources import *
        from tpufit.data.cache import CachedDataset
        def mine(sample):
            return sample
        CachedDataset(Rows(), "cache", mine, shard_mb=FILES_OF_16, workers=2).warm_up()
    """
    result = run_python(code, env=IMPORTS)
    assert "ArgumentError: workers=2: source or transform is defined in a notebook or prompt" in result.stderr


SCRIPT = """
from cache_sources import FILES_OF_16, Rows
from tpufit.data.cache import CachedDataset

print("imported as", __name__)

def mine(sample):
    return sample

def main():
    CachedDataset(Rows(), "cache", mine, shard_mb=FILES_OF_16, workers=1).warm_up(progress=False)

"""


def test_a_script_without_a_main_guard(tmp_path):
    (tmp_path / "script.py").write_text(f"{SCRIPT}main()\n")
    result = run_script(tmp_path)
    assert result.returncode == 1 and result.stdout.count("imported as") == 1
    assert "script.py. Put all but its definitions under `if __name__ ==" in result.stderr


def test_a_script_that_only_mentions_a_main_guard(tmp_path):
    (tmp_path / "script.py").write_text(f"{SCRIPT}main()  # without __main__\n")
    result = run_script(tmp_path)
    assert result.returncode == 1  # it doesn't hang, and its workers start no workers
    assert "another warm-up is running" in result.stderr
    assert "ended with exit code 1 before it made a file. Its output is above" in result.stderr


def test_a_script_with_a_main_guard(tmp_path):
    (tmp_path / "script.py").write_text(f'{SCRIPT}if __name__ == "__main__":\n    main()\n')
    result = run_script(tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(result.stdout.split()[2::3]) == ["__main__", "__mp_main__"]
    assert_right(CachedDataset.open(tmp_path / "cache"))


def run_script(folder):
    return processes.run([sys.executable, "script.py"], timeout=120, cwd=folder, env={**os.environ, **IMPORTS})
