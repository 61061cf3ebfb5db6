"""Builds the PJRT plugins in `pod/` with g++. Each wraps the CPU plugin of the wheel `xla-cpu-pjrt`."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "pod"
WHEEL = "xla-cpu-pjrt==0.0.1"
# Outside the checkout, so that a new checkout needn't download 63 MB again.
KEPT = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tpufit-pod"
UNPACKED = KEPT / WHEEL.replace("==", "-")
FOLDER = UNPACKED / "xla_plugins" / "xla_cpu_pjrt"


def built(name: str) -> tuple[str, str]:
    """Return the path of a plugin by its source, e.g. `"plugin"`, and of the CPU plugin that it wraps.

    The first call downloads and builds them.
    """
    source = SOURCES / f"{name}.cc"
    library = KEPT / f"{name}-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not UNPACKED.exists():
            # Elsewhere first: if it is killed, the next call begins again.
            with tempfile.TemporaryDirectory(dir=KEPT) as new:
                pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", new, WHEEL]
                subprocess.run(pip, check=True)
                with zipfile.ZipFile(next(Path(new).glob("*.whl"))) as wheel:
                    wheel.extractall(Path(new, "wheel"))
                Path(new, "wheel").rename(UNPACKED)
        if not library.exists():
            new = library.with_suffix(".new")
            options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-I", FOLDER / "include"]
            subprocess.run(["g++", *options, source, "-o", new, "-ldl"], check=True)
            new.rename(library)
    return str(library), str(FOLDER / "xla_cpu_pjrt.so")


def as_tpu() -> dict[str, str]:
    """Return the environment in which TorchTPU computes on the CPU, and `import torch` doesn't load it."""
    library, cpu = built("as_tpu")
    pod, _ = built("plugin")
    return {
        "TPU_LIBRARY_PATH": library,
        "AS_TPU_INNER": pod,
        "POD_INNER": cpu,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        # The threads of the plugin: on two processors it has two, and both may wait for work that neither can take up.
        "NPROC": "16",
        # What outlives a process.
        "TORCH_TPU_TIER2_COMPILATION_CACHE": "disabled",
        "TPUFIT_COMPILE_CACHE": "0",
    }
