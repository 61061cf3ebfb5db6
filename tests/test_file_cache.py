"""`FileCache`: files of this user alone, whole or not at all, within a bound, from several processes."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tpufit.utils.file_cache import FileCache


@pytest.fixture
def cache(tmp_path):
    made = FileCache(tmp_path / "home" / "kept", ".bin", limit=1000)
    made.write("ab", b"content")
    return made


@pytest.fixture
def file(cache):
    return cache.folder / "ab.bin"


def test_a_file_is_read_as_it_was_written(cache, file):
    assert cache.read("ab") == b"content" and cache.read("cd") is None
    cache.write("ab", b"other")
    assert cache.read("ab") == b"other"
    assert os.listdir(cache.folder) == ["ab.bin"]
    assert file.stat().st_mode & 0o777 == 0o600 and cache.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damaged", [b"", b"short", slice(0, -1), slice(1, None), "a bit"])
def test_a_damaged_file_is_read_as_none(cache, file, damaged):
    whole = file.read_bytes()
    if damaged == "a bit":
        damaged = whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:]
    file.write_bytes(whole[damaged] if isinstance(damaged, slice) else damaged)
    assert cache.read("ab") is None
    cache.write("ab", b"content")
    assert cache.read("ab") == b"content"


def test_a_renamed_file_is_read_as_none(cache, file):
    file.rename(file.with_name("cd.bin"))
    assert cache.read("cd") is None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_read_as_none_until_replaced(cache, file, mode):
    file.chmod(mode)
    assert cache.read("ab") is None
    cache.write("ab", b"again")
    assert cache.read("ab") == b"again" and file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_is_left_alone(cache, mode):
    cache.folder.chmod(mode)
    assert cache.read("ab") is None
    cache.write("cd", b"more")
    assert os.listdir(cache.folder) == ["ab.bin"]
    assert f"its mode is {mode:o}" in cache.find_refusal()
    cache.folder.chmod(0o700)
    assert cache.read("ab") == b"content" and cache.find_refusal() == ""


def test_folders_and_files_of_another_user_are_left_alone(cache, monkeypatch):
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert cache.read("ab") is None
    cache.write("cd", b"more")
    assert f"user {me} owns it" in cache.find_refusal()
    assert os.listdir(cache.folder) == ["ab.bin"]


def test_another_users_file_is_read_as_none(cache, monkeypatch):
    of = os.fstat

    def of_another(descriptor):
        found = of(descriptor)
        owner = found.st_uid + stat.S_ISREG(found.st_mode)
        return os.stat_result((*found[:4], owner, *found[5:]))

    monkeypatch.setattr(os, "fstat", of_another)
    assert cache.read("ab") is None and cache.find_refusal() == ""


def test_links_and_pipes_are_read_as_none(cache, file):
    whole = file.rename(file.with_name("whole"))
    file.symlink_to(whole)
    assert cache.read("ab") is None
    file.unlink()
    os.mkfifo(file, 0o600)
    assert cache.read("ab") is None
    cache.write("ab", b"again")
    assert cache.read("ab") == b"again"


def test_least_recently_used_files_are_removed_above_the_limit(cache, file):
    size = file.stat().st_size
    cache = FileCache(cache.folder, ".bin", limit=3 * size)
    (cache.folder / "mine.txt").write_bytes(bytes(5000))  # not of the cache
    for i, name in enumerate(("ab", "cd", "ef")):
        cache.write(name, b"content")
        os.utime(cache.folder / f"{name}.bin", (i + 1, i + 1))
    assert cache.read("ab") == b"content"  # is used again
    cache.write("01", b"content")
    assert sorted(os.listdir(cache.folder)) == ["01.bin", "ab.bin", "ef.bin", "mine.txt"]
    cache.write("23", bytes(3 * size))  # by itself beyond the limit
    assert sorted(os.listdir(cache.folder)) == ["01.bin", "ab.bin", "ef.bin", "mine.txt"]


def test_drafts_of_killed_processes_are_removed_once_they_are_old(cache):
    for name, age in (("new", 0), ("old", 1)):
        draft = cache.folder / f".{name}.bin.0123456789abcdef"
        draft.write_bytes(b"half")
        if age:
            os.utime(draft, (age, age))
    cache.write("cd", b"more")
    assert sorted(os.listdir(cache.folder)) == [".new.bin.0123456789abcdef", "ab.bin", "cd.bin"]


def test_a_cache_in_an_unwritable_folder_stores_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    cache = FileCache(tmp_path / "file" / "kept", ".bin", limit=1000)
    cache.write("ab", b"content")
    assert cache.read("ab") is None and cache.find_refusal() == ""


WRITES = """
import sys
from pathlib import Path
from tpufit.utils.file_cache import FileCache

cache = FileCache(Path(sys.argv[1]), ".bin", limit=20000)
for i in range(300):
    name = f"a{i % 7}"
    cache.write(name, name.encode() * 2000)
    for other in range(7):
        content = cache.read(f"a{other}")
        assert content is None or content == f"a{other}".encode() * 2000
"""


def test_processes_that_write_at_once_never_see_half_a_file(tmp_path):
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", WRITES, str(tmp_path / "kept")]
    writers = [subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [(writer.wait(), writer.communicate()[1]) for writer in writers] == [(0, "")] * 3
    assert sum(path.stat().st_size for path in (tmp_path / "kept").iterdir()) <= 20000
    assert not any(path.name.startswith(".") for path in (tmp_path / "kept").iterdir())


def test_a_killed_writer_leaves_the_old_file(tmp_path):
    code = WRITES.replace("range(300)", "range(10 ** 9)")
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    cache = FileCache(tmp_path / "kept", ".bin", limit=20000)
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", code, str(cache.folder)], env=environ)
        while not cache.folder.exists() or len(os.listdir(cache.folder)) < 3:
            assert writer.poll() is None
        writer.kill()
        writer.wait()
        found = [cache.read(f"a{i}") for i in range(7)]
        assert {content for i, content in enumerate(found) if content not in (None, f"a{i}".encode() * 2000)} == set()
