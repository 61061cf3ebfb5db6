"""The cache of compiled programs, in the user's cache folder: later processes load them.

TorchTPU's own caches keep programs of single operations, but not programs that are compiled from a text. They also
read a folder in shared memory without checking its owner, and have no size limit.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import json
import os
import re
from functools import cache
from pathlib import Path
from types import GeneratorType
from typing import Any

from ...utils import releases
from ...utils.file_cache import FileCache, cache_folder
from ...utils.garbage_collector import collector
from ...utils.user_code import warn
from .private_names import names

VARIABLE = "TPUFIT_COMPILE_CACHE"
"""The environment variable that turns the cache off if it is `0`."""

_MAX_BYTES = 4 << 30  # of all programs together
_FORMAT = 1  # increased when the key or the content of files changes
_NAME = re.compile(r"\Amodule @\S+")  # the name may contain a line of Python
# Variables that may change the compiled program. Ports and hosts are excluded, because they differ at each start.
_COMPILER_VARIABLES = re.compile(r"(XLA|LIBTPU|TPU|TORCH_TPU|TF_XLA)_(?!.*(ADDRESS|PORT|HOSTNAME|LIBRARY_PATH))|NPROC$")


def compile_or_load(text: str, core: int, cores: int) -> tuple[Any, bool]:
    """Compile a text for one of several cores, or load its program if an earlier process has stored it.

    Returns:
        The executable, and True if it was loaded.
    """
    programs = _open_cache()
    name = _name_of(text, core, cores) if programs else ""
    content = programs.read(name) if programs else None
    if content is not None:
        try:
            return names().load_executable(content), True
        except RuntimeError:
            pass  # the key has missed a difference: compile again, and replace the file
    executable = names().compile_mlir(names().parse_text(text))
    if programs:
        try:
            content = names().serialize_executable(executable)
        except RuntimeError:  # not all plugins support this
            return executable, False
        programs.write(name, content)
    return executable, False


@cache
def environment() -> dict[str, str]:
    """Return the variables that the compiler depends on, as they were when the core was started."""
    return {key: value for key, value in sorted(os.environ.items()) if _COMPILER_VARIABLES.match(key)}


def _open_cache() -> FileCache | None:
    """Return the cache, or None if it is off or has no place."""
    folder = cache_folder()
    if folder is None or os.environ.get(VARIABLE, "") == "0":
        return None
    programs = FileCache(folder / "programs", ".program", _MAX_BYTES)
    _warn_of(programs)
    return programs


@cache
def _warn_of(programs: FileCache) -> None:
    refusal = programs.find_refusal()
    if refusal:
        warn(
            f"compiled programs are neither kept nor loaded in {programs.folder}: {refusal}. Make sure that only you "
            f"can write to it (chown, chmod go-w), or set {VARIABLE}=0"
        )


def _name_of(text: str, core: int, cores: int) -> str:
    """Return the name of a program's file: a digest of everything that the program depends on."""
    depends = {
        "form": _FORMAT,
        "text": _NAME.sub("module @main", text),
        "core": [core, cores],
        "device": sorted((key, str(value)) for key, value in names().device_attributes().items()),
        "versions": {name: releases.find_version(name) for name in ("torch", "torch_tpu", "libtpu")},
        "plugin": _plugin(),
        "host": _host(),
        "environment": environment(),
        "options": _options(),
        "precision": [str(names().get_precision()), str(names().excess_precision())],
    }
    return hashlib.blake2b(json.dumps(depends).encode(), digest_size=20).hexdigest()


@cache
def _plugin() -> tuple[str, int, int] | None:
    """Return the path of the plugin that compiles, with the file's size and modification time."""
    path = os.environ.get("TPU_LIBRARY_PATH")
    if not path or not os.path.exists(path):
        return None
    found = os.stat(path)
    return path, found.st_size, found.st_mtime_ns


@cache
def _host() -> str:
    """Return the kind of this host's processor, for which XLA's CPU plugin compiles; empty for a TPU."""
    if "cpu" not in str(names().device_attributes().get("device_kind", "cpu")).lower():
        return ""
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    kept = [line for line in lines if line.startswith(("vendor_id", "cpu family", "model", "stepping", "flags"))]
    return "\n".join([*kept, str(os.cpu_count())])


def _options() -> list[str]:
    """Return the options of the open contexts of TorchTPU's `custom_compiler_options`.

    TorchTPU doesn't report them, and the user may have opened a context before tpufit was imported. So this looks for
    the contexts' generators.
    """
    code = inspect.unwrap(names().custom_options).__code__
    with collector.pausing():
        contexts = [one for one in gc.get_objects() if type(one) is GeneratorType and one.gi_code is code]
    frames = [one.gi_frame for one in contexts if one.gi_frame is not None]
    return sorted(str(sorted(frame.f_locals["options"].items())) for frame in frames)
