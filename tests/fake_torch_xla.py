"""A stand-in for torch_xla on machines that aren't here: hosts with TPUs, pods, a runtime that somebody started.

Only what `tpufit.runtime.devices` and the places of a mesh touch, with the behaviour that torch_xla 2.9 documents. No
TPU has run any of it.
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
    """Put the fake in place of torch_xla, and return it; `calls` lists what was done to it.

    `own` are the numbers of this process's devices (default: all).
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
    for kernels in ("lower_missing", "narrow_indices"):  # they stand around torch_xla's own, which aren't here
        monkeypatch.setattr(f"tpufit.runtime.devices.{kernels}", lambda: None)
    monkeypatch.setitem(sys.modules, "torch_xla", fake)
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)
    return fake
