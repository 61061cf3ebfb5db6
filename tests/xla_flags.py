"""The flags of XLA that tests run with: those that make it quick to compile, and the ones that are set already."""

from __future__ import annotations

import os

# In a test a graph takes far longer to compile than to run. Together these take seven eighths of it away.
QUICK_TO_COMPILE = " ".join(
    [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)


def compile_quickly() -> None:
    """Add the quick flags to `XLA_FLAGS`, unless it is set to nothing, which asks for XLA as users have it."""
    given = os.environ.get("XLA_FLAGS")
    if given is None or (given and QUICK_TO_COMPILE not in given):
        os.environ["XLA_FLAGS"] = f"{QUICK_TO_COMPILE} {given or ''}".rstrip()


def as_users_have_it() -> str:
    """`XLA_FLAGS` without the quick ones: what was set for the whole run, such as `--xla_cpu_max_isa=AVX2`."""
    return os.environ.get("XLA_FLAGS", "").replace(QUICK_TO_COMPILE, "").strip()
