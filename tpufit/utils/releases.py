"""Compatible versions: torch with its runtime, and the TPU's compiler with the JAX that calls it.

An error about versions can therefore say which command installs versions that work together.

Reads pip's metadata, without importing the packages, since each may be broken.
"""

import sys
from collections.abc import Mapping
from importlib import metadata

from ..errors import VersionError

# The tested compilers for each release: the versions of libtpu, and the versions of JAX tested with each. The first are
# the versions of torch_xla's extras `tpu` and `pallas`, the last the versions that pip chooses for ours.
TRIED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "2.8": {"0.0.17": ("0.6.2", "0.7.2")},
    "2.9": {"0.0.21": ("0.7.1", "0.7.2"), "0.0.21.1": ("0.7.1", "0.7.2")},
}
# The release for a machine without torch.
NEWEST = "2.9"
# The releases of torch for each runtime. No release works with both, so an environment has only one runtime.
RUNTIMES: Mapping[str, tuple[str, ...]] = {
    "torch_xla": tuple(TRIED),
    "torch_tpu": ("2.11", "2.12", "2.13", "2.14", "2.15"),
}
# The compilers tested with torch_tpu, likewise.
_TESTED_WITH_TORCH_TPU: Mapping[str, tuple[str, ...]] = {"0.0.51": ("0.10.2",)}
_XLA = "pip install 'tpufit[xla]'"
_TPU = "pip install 'tpufit[tpu]'"
# The packages of the compiler.
COMPILER = ("libtpu", "jax", "jaxlib")


def find_version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def find_compiler_versions() -> dict[str, str | None]:
    """Return the installed versions of the TPU's compiler and its runtime; None if missing."""
    runtime = "torch_tpu" if find_version("torch_tpu") and not find_version("torch_xla") else "torch_xla"
    return {name: find_version(name) for name in (runtime, *COMPILER)}


def find_runtime(found: Mapping[str, str | None]) -> str:
    """Return the runtime among some versions: torch_tpu if it is there, else torch_xla."""
    return "torch_tpu" if found.get("torch_tpu") is not None else "torch_xla"


def sets_flags(found: Mapping[str, str | None]) -> bool:
    """True if the runtime starts a TPU with its own flags, which the compiler reads: torch_xla does."""
    return find_runtime(found) == "torch_xla"


def _find_tested(found: Mapping[str, str | None]) -> Mapping[str, tuple[str, ...]]:
    """Return the compilers tested with an installed runtime."""
    if find_runtime(found) == "torch_tpu":
        return _TESTED_WITH_TORCH_TPU
    return TRIED.get(parse_release(found.get("torch_xla")) or "", {})


def has_runtime() -> bool:
    """True if torch_xla is installed. torch_tpu doesn't count, because without a TPU it has no cores.

    Raises:
        VersionError: torch_xla is installed together with another release of torch, or with torch_tpu.
    """
    if find_version("torch_xla") is None:
        return False
    check_versions(*(find_version(name) for name in ("torch", *RUNTIMES)))
    return True


def parse_release(version: str | None) -> str | None:
    """Return a version's release, if tpufit supports it.

    Example:
        >>> parse_release("2.9.0+cpu"), parse_release("2.10.1"), parse_release(None)
        ('2.9', None, None)
    """
    release = _minor(version)
    return release if release in TRIED else None


def check_versions(torch_version: str | None, xla_version: str | None, tpu_version: str | None = None) -> str:
    """Check that torch and one runtime are installed and compatible; return the release of torch.

    Args:
        torch_version: The version of torch; None if it isn't installed.
        xla_version: The version of torch_xla, likewise.
        tpu_version: The version of torch_tpu, likewise (default None).

    Raises:
        VersionError: They aren't.

    Example:
        >>> check_versions("2.8.0+cpu", "2.8.0"), check_versions("2.13.0", None, "0.2.0")
        ('2.8', '2.13')
    """
    if xla_version is None and tpu_version is None:
        # An image's other packages were built for its torch, so suggest a pair that keeps it.
        absent = "torch is not installed, nor is" if torch_version is None else f"torch {torch_version} is here without"
        first = _XLA if parse_release(torch_version) != "2.8" else "pip install torch_xla==2.8.0"
        raise VersionError(
            f"{absent} a runtime for its cores. Run: {first} (torch_xla: virtual cores of a CPU, and the TPUs of "
            f"Kaggle and Colab; torch 2.8 or 2.9), or: {_TPU} (TorchTPU: TPUs; torch 2.11 to 2.15). "
            "compile(run_eagerly=True) needs neither"
        )
    if tpu_version is not None:
        return _check_with_torch_tpu(torch_version, xla_version, tpu_version)
    torch_release = parse_release(torch_version)
    xla_release = parse_release(xla_version)
    if torch_release is not None and torch_release == xla_release:
        return torch_release
    # An image's other packages were built for its torch, so keep it if possible.
    kept = torch_release or NEWEST
    own = "" if torch_release else f"torch=={kept}.0 "
    cure = f"Run: pip install {own}torch_xla=={kept}.0"
    for name, found in (("torch", torch_version), ("torch_xla", xla_version)):
        if found is None:
            raise VersionError(f"{name} is not installed. {cure}")
    pairs = " or ".join(f"{release} of both" for release in TRIED)
    here = f"torch {torch_version} and torch_xla {xla_version}"
    raise VersionError(f"torch and torch_xla only work as a pair, {pairs}; here are {here}. {cure}")


def _minor(version: str | None) -> str:
    return ".".join(str(version).split(".")[:2])


def _check_with_torch_tpu(torch_version: str | None, xla_version: str | None, tpu_version: str) -> str:
    release = _minor(torch_version)
    fits = release in RUNTIMES["torch_tpu"]
    here = "no torch" if torch_version is None else f"torch {torch_version}"
    if xla_version is not None:
        raise VersionError(
            f"torch_xla {xla_version} and torch_tpu {tpu_version} can't be in one environment, because no torch works "
            f"with both; here is {here}. Run: pip uninstall -y {'torch_xla' if fits else 'torch_tpu'}"
        )
    if not fits:
        raise VersionError(f"torch_tpu {tpu_version} works with torch 2.11 to 2.15; here is {here}. Run: {_TPU}")
    return release


def list_missing(found: Mapping[str, str | None]) -> list[str]:
    """Return the missing packages of the TPU's compiler, whose version is None or absent.

    Example:
        >>> list_missing({"libtpu": "0.0.21", "jax": "0.7.1"})
        ['jaxlib']
    """
    return [name for name in COMPILER if found.get(name) is None]


def is_tested(found: Mapping[str, str | None]) -> bool:
    """True if the installed compiler was tested with the installed runtime.

    Example:
        >>> is_tested({"torch_xla": "2.9.0", "libtpu": "0.0.21.1", "jax": "0.7.2", "jaxlib": "0.7.2"})
        True
    """
    by_libtpu = _find_tested(found)
    return found.get("jax") == found.get("jaxlib") and found.get("jax") in by_libtpu.get(str(found.get("libtpu")), ())


def explain_untested(found: Mapping[str, str | None]) -> str:
    """Return the sentence that an installed compiler is untested."""
    here = ", ".join(f"{name} {found[name]}" for name in COMPILER)
    runtime = find_runtime(found)
    return f"tpufit is untested with the installed TPU compiler ({here}) and {runtime} {found[runtime]}"


def explain_unknown_chip(found: Mapping[str, str | None], chip: str) -> str:
    """Return the sentence that the compiler of the installed runtime lacks a chip, which that of TorchTPU has."""
    runtime = find_runtime(found)
    return (
        f"the compiler that goes with {runtime} has no {chip}, which is newer. Run this preflight where TorchTPU is "
        f"installed: {_TPU}, in an environment without {runtime}"
    )


def is_tested_libtpu(found: Mapping[str, str | None]) -> bool:
    """True if the installed libtpu was tested with the installed runtime."""
    return found.get("libtpu") in _find_tested(found)


def make_install_command(found: Mapping[str, str | None], *names: str) -> str:
    """Return the command that installs a compiler tested with the installed runtime, and keeps suitable packages.

    Without names it installs all packages that are missing or untested.

    Example:
        >>> make_install_command({"torch_xla": "2.8.0", "libtpu": "0.0.17"})
        'pip install jax==0.7.2 jaxlib==0.7.2'
        >>> make_install_command({"torch_xla": "2.8.0"}, "libtpu")
        'pip install libtpu==0.0.17'
        >>> make_install_command({"torch_tpu": "0.2.0", "libtpu": "0.0.51"})
        'pip install jax==0.10.2 jaxlib==0.10.2'
    """
    by_libtpu = _find_tested(found) or TRIED[NEWEST]
    libtpu = str(found.get("libtpu"))
    jax = found.get("jax")
    # There is no 0.0.21 for Python 3.13, and no 0.0.21.1 for 3.10.
    newest = list(by_libtpu)[0 if sys.version_info < (3, 11) else -1]
    libtpu = libtpu if libtpu in by_libtpu else newest
    jax = jax if jax in by_libtpu[libtpu] else by_libtpu[libtpu][-1]
    wanted = {"libtpu": libtpu, "jax": jax, "jaxlib": jax}
    chosen = names or [name for name in COMPILER if found.get(name) != wanted[name]]
    return "pip install " + " ".join(f"{name}=={wanted[name]}" for name in chosen)
