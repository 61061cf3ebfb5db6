"""Translates errors from torch_xla's start into sentences that name the cure."""

import re

from ...errors import DeviceBusyError, StartError
from ...runtime.device_errors import add_runtime_text
from ...utils import hardware, releases
from .release_differences import extract_message

_BUSY = re.compile(r"already in use|device or resource busy|in used? by another process", re.IGNORECASE)
_CLOSED = re.compile(r"/dev/(?:accel|vfio)\S*\)?:? .*(?:Operation not permitted|Permission denied)", re.IGNORECASE)


def translate_import(error: BaseException) -> StartError:
    """Translate the error of an import of torch_xla that can't determine the type of the TPU.

    During its import torch_xla asks for the type of the chips: the cloud's metadata server, which notebook hosts may
    not reach, or the environment, if `TPU_SKIP_MDS_QUERY` is set. Without an answer the import fails on a `None`.
    """
    sentence = (
        "torch_xla can't be imported, because it can't determine the type of this TPU. Before Python starts, set "
        "TPU_SKIP_MDS_QUERY=1, TPU_ACCELERATOR_TYPE to the type of the TPU, e.g. v5litepod-8, and TPU_WORKER_ID=0"
    )
    return StartError(add_runtime_text(sentence, f"{type(error).__name__}: {extract_message(error)}"))


def translate_start(error: BaseException, platform: str | None, requested_device: str | None) -> StartError:
    """Translate the error of a runtime that doesn't start.

    Args:
        error: The error that torch_xla raised.
        platform: The kind of device that should have started, e.g. `"TPU"`.
        requested_device: The value of `PJRT_DEVICE` in the user's environment, or None.

    Example:
        >>> print(translate_start(OSError("libtpu not found"), "TPU", "TPU"))  # doctest: +ELLIPSIS
        PJRT_DEVICE='TPU' requests a TPU, but its driver, libtpu, is not installed. On a TPU run: pip install libtpu==...; without a TPU unset PJRT_DEVICE
        torch_xla says: libtpu not found
    """  # noqa: E501
    text = extract_message(error)
    holders = hardware.find_tpu_processes()
    asks = f"PJRT_DEVICE={requested_device!r} requests a {platform}, but"
    if ("libtpu" in text and ("not found" in text or "cannot open" in text)) or "Failed to open" in text:
        installed = {"torch_xla": releases.find_version("torch_xla")}
        cure = f"On a TPU run: {releases.make_install_command(installed, 'libtpu')}; without a TPU unset PJRT_DEVICE"
        message = f"{asks} its driver, libtpu, is not installed. {cure}"
    elif platform is None or "PJRT_DEVICE is not set" in text or "Missing XLA configuration" in text:
        message = "no device is chosen. Set PJRT_DEVICE=TPU (or CPU), and unset PJRT_SELECT_DEFAULT_DEVICE"
    elif "No PjRtPlugin" in text or "Unknown PJRT_DEVICE" in text:
        message = f"{asks} torch_xla supports only TPU and CPU here. Unset PJRT_DEVICE to use a TPU, if there is one"
    elif _BUSY.search(text) or _CLOSED.search(text):
        hidden = "a process of another user or in another container"
        who = f"process {hardware.describe_processes(holders)}" if holders else hidden
        message = (
            f"the TPU is in use by {who}. End that process yourself, e.g. an old notebook kernel or run; tpufit kills "
            "no process. If no process uses the TPU, remove /tmp/libtpu_lockfile, or run as a user who may open "
            "/dev/accel* and /dev/vfio/*"
        )
        return DeviceBusyError(add_runtime_text(message, text))
    elif platform == "TPU" and not hardware.find_chips():
        message = f"{asks} this host has no TPU chip on its PCI bus. Choose a TPU machine, or unset PJRT_DEVICE"
    else:
        who = f" ({hardware.describe_processes(holders)} has it open)" if holders else ""
        message = (
            f"the {platform} runtime of torch_xla did not start. If another process uses the TPU{who}, end it. If "
            f"there is no TPU, unset PJRT_DEVICE (now {requested_device!r}). For more checks, run python -m tpufit "
            "doctor"
        )
    return StartError(add_runtime_text(message, text))
