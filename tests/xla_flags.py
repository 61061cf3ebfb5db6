"""XLA's flags for tests: flags for quick compilation, and the flags that are already set."""

from __future__ import annotations

import os
from importlib.util import find_spec

# In tests a graph takes far longer to compile than to run. These flags save seven eighths of the time.
QUICK_TO_COMPILE = " ".join(
    [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        # TorchTPU's plugin doesn't know this flag, and ends the process.
        *([] if find_spec("torch_tpu") else ["--xla_cpu_use_fusion_emitters=false"]),
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)


def compile_quickly() -> None:
    """Add the quick flags to `XLA_FLAGS`, unless it is set to "", which requests XLA's defaults."""
    given = os.environ.get("XLA_FLAGS")
    if given is None or (given and QUICK_TO_COMPILE not in given):
        os.environ["XLA_FLAGS"] = f"{QUICK_TO_COMPILE} {given or ''}".rstrip()


def as_users_have_it() -> str:
    """Return `XLA_FLAGS` without the quick flags, e.g. a `--xla_cpu_max_isa=AVX2` that was set for the whole run."""
    return os.environ.get("XLA_FLAGS", "").replace(QUICK_TO_COMPILE, "").strip()
