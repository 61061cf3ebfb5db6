"""The hardware of a host, read from a folder with the layout of its file system."""

import os

import pytest

from tpufit.utils import hardware


def lay_out(root, *, device=None, chips=0, folders=()):
    """Create a root folder with TPU chips on its PCI bus, and other folders."""
    for number in range(chips):
        card = root / "sys/bus/pci/devices" / f"0000:00:0{number}.0"
        card.mkdir(parents=True)
        (card / "vendor").write_text("0x1ae0\n")
        (card / "device").write_text(f"{device}\n")
    network = root / "sys/bus/pci/devices/0000:00:09.0"  # also Google's, but not a TPU
    network.mkdir(parents=True)
    (network / "vendor").write_text("0x1ae0\n")
    (network / "device").write_text("0x0042\n")
    for folder in folders:
        (root / folder).mkdir(parents=True)
    return root


@pytest.mark.parametrize(
    ("device", "chips", "name", "cores"),
    [
        ("0x0027", 4, "v2 or v3", 8),
        ("0x005e", 4, "v4", 4),
        ("0x0063", 1, "v5e", 1),
        ("0x0063", 8, "v5e", 8),
        ("0x0062", 4, "v5p", 4),
        ("0x006f", 8, "v6e", 8),
        ("0x0076", 4, "v7x", 8),
    ],
)
def test_the_chips_of_each_type(tmp_path, device, chips, name, cores):
    found = hardware.find_chips(lay_out(tmp_path, device=device, chips=chips))
    assert {chip.name for chip in found} == {name}
    assert sum(chip.devices for chip in found) == cores


@pytest.mark.parametrize(
    ("chips", "folders", "place"),
    [
        (8, ["kaggle/working"], "Kaggle"),
        (0, ["kaggle/working"], "Kaggle"),
        (1, ["content", "usr/local/lib/python3.12/dist-packages/google/colab"], "Colab"),
        (4, [], "TPU VM"),
        (4, ["content"], "TPU VM"),
        (0, [], "a machine without a TPU"),
    ],
)
def test_the_platform_is_recognized(tmp_path, monkeypatch, chips, folders, place):
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")  # copied from elsewhere
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    assert hardware.find_platform(lay_out(tmp_path, device="0x0063", chips=chips, folders=folders)) == place


LEFT = {"TPU_PROCESS_ADDRESSES": "local", "CLOUD_TPU_TASK_ID": "0", "TPU_ACCELERATOR_TYPE": "v3-8"}


def test_on_kaggle_stale_variables_are_removed(tmp_path):
    environ = dict(LEFT)
    with pytest.warns(UserWarning, match="removed TPU_PROCESS_ADDRESSES='local' and CLOUD_TPU_TASK_ID='0'"):
        hardware.drop_stale_variables(environ, lay_out(tmp_path, device="0x0027", chips=4, folders=["kaggle"]))
    assert environ == {"TPU_ACCELERATOR_TYPE": "v3-8"}


@pytest.mark.parametrize(("chips", "folders"), [(4, []), (0, ["kaggle"])])
def test_stale_variables_stay_without_kaggles_tpu(tmp_path, chips, folders):
    environ = dict(LEFT)
    hardware.drop_stale_variables(environ, lay_out(tmp_path, device="0x0027", chips=chips, folders=folders))
    assert environ == LEFT


@pytest.mark.parametrize(("chips", "left"), [(0, {"TPU_SKIP_MDS_QUERY": "1"}), (4, {})])
def test_without_a_tpu_the_cloud_is_not_asked_for_one(tmp_path, chips, left):
    environ = {}
    hardware.skip_metadata_query(environ, lay_out(tmp_path, device="0x0027", chips=chips, folders=[]))
    assert environ == left


def test_the_processes_that_use_the_tpu(tmp_path):
    for pid, opened in ((17, "/dev/vfio/0"), (18, "/dev/null"), (9, "/dev/accel0")):
        (tmp_path / f"proc/{pid}/fd").mkdir(parents=True)
        os.symlink(opened, tmp_path / f"proc/{pid}/fd/3")
        (tmp_path / f"proc/{pid}/cmdline").write_text(f"python\0run{pid}.py\0")
    (tmp_path / "proc/20").mkdir()  # another user's
    assert hardware.find_tpu_processes(tmp_path) == {9: "python run9.py", 17: "python run17.py"}
    assert os.getpid() not in hardware.find_tpu_processes()


@pytest.mark.parametrize("path", ["sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"])
def test_a_containers_memory(tmp_path, path):
    assert "the container (cgroup)" not in hardware.read_memory_limits(tmp_path)
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(f"{1 << 30}\n")
    assert hardware.read_memory_limits(tmp_path)["the container (cgroup)"] == 1 << 30
    (tmp_path / path).write_text("max\n")
    assert "the container (cgroup)" not in hardware.read_memory_limits(tmp_path)
