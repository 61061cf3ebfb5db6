"""A stand-in for torch_xla on other machines: hosts with TPUs, pods, a runtime that has already started.

It has only the members that `tpufit.drivers.xla` and meshes use, with the behavior that torch_xla 2.9 documents. It
was never compared with a TPU.
"""

import sys
from types import ModuleType, SimpleNamespace


def install(
    monkeypatch,
    *,
    platform="TPU",
    devices=8,
    processes=1,
    started=False,
    spmd=False,
    locked=False,
    fails=None,
    own=None,
):
    """Replace torch_xla by the fake, and return it; its `calls` lists the calls.

    `own` are the indices of this process's devices (default: all).
    """
    fake, runtime = ModuleType("torch_xla"), ModuleType("torch_xla.runtime")
    fake.calls = []

    def count():
        if fails:
            raise RuntimeError(fails)
        fake.calls.append("start")
        return devices

    def use_spmd():
        fake.calls.append("use_spmd")

    fake.runtime = runtime
    fake._prepare_to_exit = lambda: None
    fake._XLAC = SimpleNamespace(
        _xla_runtime_is_initialized=lambda: started,
        _xla_get_spmd_config_is_locked=lambda: locked,
        _xla_get_all_runtime_devices=lambda: [f"{platform}:{i}" for i in range(devices)],
        _xla_get_runtime_devices=lambda: [f"{platform}:{i}" for i in (range(devices) if own is None else own)],
    )
    runtime.device_type = lambda: platform
    runtime.global_runtime_device_count = count
    runtime.process_count = lambda: processes
    runtime.is_spmd = lambda: spmd
    runtime.use_spmd = use_spmd
    for kernels in (
        "lower_missing",
        "patch_kernels",
        "patch_syncs",
        "narrow_indices",
    ):  # these wrap torch_xla's kernels, which the fake lacks
        monkeypatch.setattr(f"tpufit.drivers.xla.start.{kernels}", lambda *key: None)
    monkeypatch.setitem(sys.modules, "torch_xla", fake)
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)
    return fake
