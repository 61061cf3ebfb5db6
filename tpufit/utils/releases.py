"""The versions that go together: torch with torch_xla, and the TPU's compiler with the JAX that calls it.

Read from what pip has written down, without importing any of them: each may be the fault.
"""

import sys
from collections.abc import Mapping
from importlib import metadata

from ..errors import VersionError

# The compilers that were tried with each release: the versions of libtpu, and those of JAX that called each of them.
# The first are those of torch_xla's own extras `tpu` and `pallas`, and the last what pip takes for ours.
TRIED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "2.8": {"0.0.17": ("0.6.2", "0.7.2")},
    "2.9": {"0.0.21": ("0.7.1", "0.7.2"), "0.0.21.1": ("0.7.1", "0.7.2")},
}
# What a machine without torch gets.
NEWEST = "2.9"
# The packages of the compiler.
COMPILER = ("libtpu", "jax", "jaxlib")


def version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def compiler() -> dict[str, str | None]:
    """The installed versions of the TPU's compiler and of the torch_xla that it goes with; None if missing."""
    return {name: version(name) for name in ("torch_xla", *COMPILER)}


def release_of(version: str | None) -> str | None:
    """The release that a version belongs to, if it is one of those that tpufit works with.

    Example:
        >>> release_of("2.9.0+cpu"), release_of("2.10.1"), release_of(None)
        ('2.9', None, None)
    """
    release = ".".join(str(version).split(".")[:2])
    return release if release in TRIED else None


def check_versions(torch_version: str | None, xla_version: str | None) -> str:
    """Check that torch and torch_xla are installed, and belong together; return their release.

    Raises:
        VersionError: They don't.

    Example:
        >>> check_versions("2.8.0+cpu", "2.8.0")
        '2.8'
    """
    torch_release = release_of(torch_version)
    xla_release = release_of(xla_version)
    if torch_release is not None and torch_release == xla_release:
        return torch_release
    # torch is what other packages of an image were built for, so it stays wherever it can.
    kept = torch_release or NEWEST
    own = "" if torch_release else f"torch=={kept}.0 "
    cure = f"Run: pip install {own}torch_xla=={kept}.0"
    for name, found in (("torch", torch_version), ("torch_xla", xla_version)):
        if found is None:
            raise VersionError(f"{name} is not installed. {cure}")
    pairs = " or ".join(f"{release} of both" for release in TRIED)
    here = f"torch {torch_version} and torch_xla {xla_version}"
    raise VersionError(f"torch and torch_xla only work as a pair, {pairs}; here are {here}. {cure}")


def missing(found: Mapping[str, str | None]) -> list[str]:
    """The packages of the TPU's compiler that aren't installed: their version is None or not there.

    Example:
        >>> missing({"libtpu": "0.0.21", "jax": "0.7.1"})
        ['jaxlib']
    """
    return [name for name in COMPILER if found.get(name) is None]


def tried(found: Mapping[str, str | None]) -> bool:
    """True if the installed compiler was tried with the installed torch_xla.

    Example:
        >>> tried({"torch_xla": "2.9.0", "libtpu": "0.0.21.1", "jax": "0.7.2", "jaxlib": "0.7.2"})
        True
    """
    by_libtpu = TRIED.get(release_of(found.get("torch_xla")) or "", {})
    return found.get("jax") == found.get("jaxlib") and found.get("jax") in by_libtpu.get(str(found.get("libtpu")), ())


def untried(found: Mapping[str, str | None]) -> str:
    """Say that nobody has tried an installed compiler."""
    here = ", ".join(f"{name} {found[name]}" for name in COMPILER)
    return f"tpufit was not tried with the TPU's compiler that is here ({here}) and torch_xla {found['torch_xla']}"


def tried_libtpu(found: Mapping[str, str | None]) -> bool:
    """True if the installed libtpu was tried with the installed torch_xla."""
    return found.get("libtpu") in TRIED.get(release_of(found.get("torch_xla")) or "", {})


def command(found: Mapping[str, str | None], *names: str) -> str:
    """The command that installs a compiler that was tried with the installed torch_xla, and leaves what is fine.

    Without names it installs all packages that aren't there, or aren't of a tried set.

    Example:
        >>> command({"torch_xla": "2.8.0", "libtpu": "0.0.17"})
        'pip install jax==0.7.2 jaxlib==0.7.2'
        >>> command({"torch_xla": "2.8.0"}, "libtpu")
        'pip install libtpu==0.0.17'
    """
    by_libtpu = TRIED[release_of(found.get("torch_xla")) or NEWEST]
    libtpu = str(found.get("libtpu"))
    jax = found.get("jax")
    # There is no 0.0.21 for Python 3.13, and no 0.0.21.1 for 3.10.
    newest = list(by_libtpu)[0 if sys.version_info < (3, 11) else -1]
    libtpu = libtpu if libtpu in by_libtpu else newest
    jax = jax if jax in by_libtpu[libtpu] else by_libtpu[libtpu][-1]
    wanted = {"libtpu": libtpu, "jax": jax, "jaxlib": jax}
    chosen = names or [name for name in COMPILER if found.get(name) != wanted[name]]
    return "pip install " + " ".join(f"{name}=={wanted[name]}" for name in chosen)
