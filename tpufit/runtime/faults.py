"""Errors of torch_xla, XLA and libtpu, put into a sentence that names the cure."""

import re

from .. import errors
from ..backend.load import Load
from ..errors import StartError, TpufitError, counted
from ..utils import hardware, releases
from ..utils.out_of_memory import remedies, shortage
from ..utils.text import bytes_of, size
from .release import message_of

# The memory of a core, where an error doesn't name it: that of most TPUs.
_ROOM = 1 << 34
# As the runtimes write them: XLA:CPU; XLA:TPU at compile time; libtpu loading a program, or making room for a tensor.
_FULL = re.compile(r"RESOURCE_EXHAUSTED|out of memory|std::bad_alloc|cannot allocate memory", re.IGNORECASE)
_SCRATCH = re.compile(r"memory space (vmem|smem)")
_BUSY = re.compile(r"already in use|device or resource busy|in used? by another process", re.IGNORECASE)
_CLOSED = re.compile(r"/dev/(?:accel|vfio)\S*\)?:? .*(?:Operation not permitted|Permission denied)", re.IGNORECASE)
# Words that a user's own error may hold must not be enough here.
_LOST = re.compile(
    r"halted (?:unexpectedly|prematurely)|health check failed|\b(?:UNAVAILABLE|DATA_LOSS|ABORTED): |Socket closed"
    r"|already in an error state"
)
_MESH = re.compile(r"device IDs|match mesh (?:size|dimensions)|mesh_shape", re.IGNORECASE)
_PARTITION = re.compile(r"spmd_partitioner|SPMD partition|GSPMD|hlo_sharding|[Ss]harding.propagation|tile_assignment")

_NO_KERNEL = re.compile(r"Could not run '(?:aten::)?(\S+?)' with arguments from the '(\S+?)' backend")
_ON_HOST = re.compile(r"Expected XLA tensor|not an XLA tensor")

_OTHERS: tuple[tuple[re.Pattern[str], type[TpufitError], str], ...] = (
    (
        _LOST,
        errors.DeviceLostError,
        "the device was lost while it computed. Restart the process (in a notebook: the kernel) and go on from the "
        "last checkpoint; if it happens again, restart the TPU, or get another: python -m tpufit doctor tries it",
    ),
    (
        _PARTITION,
        errors.PartitionError,
        "XLA could not divide this step among the cores. Find the operation with cores=1, where nothing is divided, "
        "and fewer layers; unset XLA_AUTO_SPMD and XLA_AUTO_SPMD_MESH if they are set; a metric that causes it can be "
        "computed from model.predict(...) instead",
    ),
    (
        _ON_HOST,
        errors.PlacementError,
        "a step computes with a tensor that is on the host. What it uses beside the batch moves to the device if it is "
        "a module or a parameter among the attributes of the Model, in lists and dicts too (self.teacher = teacher), a "
        "parameter or buffer of such a module, or part of the loss of compile",
    ),
)


def translate(error: BaseException, load: Load | None = None) -> TpufitError | None:
    """Translate an error of the runtime to one of tpufit, with the runtime's text below. Raise it `from error`.

    Args:
        error: The error that torch_xla raised while a step was compiled or run.
        load: The step's load on the device, as far as known.

    Returns:
        The error to raise, or None for an unknown one, which is best left as it is.

    Example:
        >>> print(translate(RuntimeError("INTERNAL: Core halted unexpectedly")))
        the device was lost while it computed. Restart the process (in a notebook: the kernel) and go on from the last checkpoint; if it happens again, restart the TPU, or get another: python -m tpufit doctor tries it
        torch_xla says: INTERNAL: Core halted unexpectedly
        >>> translate(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    """  # noqa: E501
    if isinstance(error, TpufitError) or not isinstance(error, (RuntimeError, AssertionError)):
        return None
    text = message_of(error)
    if (missing := _NO_KERNEL.search(text)) is not None:
        kind = "sparse tensors" if missing[2].startswith("Sparse") else f"tensors of {missing[2]}"
        return errors.DeviceError(
            f"torch_xla has no operation {missing[1]} for {kind}. Make the tensor dense (to_dense(), sparse=False), do "
            "this in the data set, or in a callback"
        )
    if _SCRATCH.search(text):  # before `_FULL`, whose words are in it too
        sentence = (
            "an operation needs more of a core's scratch memory than there is, a fault of the compiler, not of the "
            "batch size. Try another size of the layer that the text below names, or set "
            "LIBTPU_INIT_ARGS=--xla_tpu_scoped_vmem_limit_kib=65536 before the start"
        )
        return errors.OutOfMemoryError(_with(sentence, text))
    if _FULL.search(text):
        return errors.OutOfMemoryError(_with(_full(text, load), text))
    if _MESH.search(text) and isinstance(error, AssertionError):
        sentence = (
            "the cores that tpufit has settled are not those that the runtime has now. Something else has changed "
            "them in this process: restart it (in a notebook: the kernel), and leave them to tpufit.init()"
        )
        return errors.CoresError(_with(sentence, text))
    return next((kind(_with(sentence, text)) for known, kind, sentence in _OTHERS if known.search(text)), None)


def translate_import(error: BaseException) -> StartError:
    """Translate the error of a torch_xla that can't be imported beside a TPU, for want of the TPU's type.

    Where it sees chips it asks for their type while it is imported: the cloud's metadata server, which notebooks' hosts
    may not reach, or the environment, if `TPU_SKIP_MDS_QUERY` is set. Without an answer it fails over its own `None`.
    """
    sentence = (
        "torch_xla can't be imported, as it can't learn what kind of TPU this is. Before Python starts set "
        "TPU_SKIP_MDS_QUERY=1 and TPU_ACCELERATOR_TYPE to the TPU's own type, such as v5litepod-8, and TPU_WORKER_ID=0"
    )
    return StartError(_with(sentence, f"{type(error).__name__}: {message_of(error)}"))


def translate_start(error: BaseException, platform: str | None, wish: str | None) -> StartError:
    """Translate the error of a runtime that doesn't start.

    Args:
        error: The error that torch_xla raised.
        platform: The kind of device that was to start, e.g. `"TPU"`.
        wish: The value of `PJRT_DEVICE` in the user's environment, or None.

    Example:
        >>> print(translate_start(OSError("libtpu not found"), "TPU", "TPU"))  # doctest: +ELLIPSIS
        PJRT_DEVICE='TPU' asks for a TPU, but libtpu, its driver, is not installed. On a TPU run: pip install libtpu==...; without one unset PJRT_DEVICE
        torch_xla says: libtpu not found
    """  # noqa: E501
    text = message_of(error)
    held = hardware.holders()
    asks = f"PJRT_DEVICE={wish!r} asks for a {platform}, but"
    if ("libtpu" in text and ("not found" in text or "cannot open" in text)) or "Failed to open" in text:
        found = {"torch_xla": releases.version("torch_xla")}
        cure = f"On a TPU run: {releases.command(found, 'libtpu')}; without one unset PJRT_DEVICE"
        said = f"{asks} libtpu, its driver, is not installed. {cure}"
    elif platform is None or "PJRT_DEVICE is not set" in text or "Missing XLA configuration" in text:
        said = "no device is chosen. Set PJRT_DEVICE=TPU (or CPU), and unset PJRT_SELECT_DEFAULT_DEVICE"
    elif "No PjRtPlugin" in text or "Unknown PJRT_DEVICE" in text:
        said = f"{asks} torch_xla knows only TPU and CPU here. Unset PJRT_DEVICE: then a TPU is taken, if there is one"
    elif _BUSY.search(text) or _CLOSED.search(text):
        hidden = "another process, of another user or in another container"
        who = f"process {hardware.describe(held)}" if held else hidden
        said = (
            f"the TPU is held by {who}. End it yourself, e.g. an old notebook kernel or run; tpufit kills nothing. If "
            "nobody holds it, remove /tmp/libtpu_lockfile, or run as a user that may open /dev/accel* and /dev/vfio/*"
        )
        return errors.DeviceBusyError(_with(said, text))
    elif platform == "TPU" and not hardware.chips():
        said = f"{asks} this host has no TPU chip on its PCI bus. Choose a TPU machine, or unset PJRT_DEVICE"
    else:
        who = f" ({hardware.describe(held)} has it open)" if held else ""
        said = (
            f"the {platform} runtime of torch_xla did not start. If another process holds the TPU{who}, end it; if "
            f"there is no TPU, unset PJRT_DEVICE (now {wish!r}); python -m tpufit doctor looks for more"
        )
    return StartError(_with(said, text))


def _full(text: str, load: Load | None) -> str:
    """The sentence for a full memory."""
    said = shortage(text)
    if said.needs:
        need = f": it needs {_legible(said.needs)} of {_legible(said.has)}"
    elif said.free:
        need = f": {_legible(said.more)} more were asked for, {_legible(said.free)} are free"
    elif said.more:
        need = f": {_legible(said.more)} more were asked for"
    else:
        need = ""
    if load is None:
        return f"the device has no room{need}. Take a smaller batch_size"
    each = -(-load.rows // load.cores)
    if load.role == "train":
        have = (
            f"weights {size(load.weights)}, optimizer {size(load.optimizer)}, gradients "
            f"{size(load.learns)}, batch {size(load.batch)}; the rest are activations"
        )
        state = load.weights + load.optimizer + load.learns
        room = bytes_of(said.has) if said.has else _ROOM
        cures = remedies(state, max(room, state), each, load.cores, load.split, load.remat)
        cures += ["compile(precision='bf16')"] if load.precision == "fp32" else []
        cures += ["an optimizer with less state"] if load.optimizer > load.weights else []
    else:
        have = f"weights {size(load.weights)}, batch {size(load.batch)}; the rest are activations and outputs"
        cures = [f"a smaller batch_size, such as {max(1, each // 2)}"]
    step = f"a {load.role} step of {counted(each, 'row')} a core"
    return f"the device has no room for {step}{need}. On each core are {have}. Try {', or '.join(cures)}"


def _legible(nbytes: str) -> str:
    return size(int(nbytes)) if nbytes.isdecimal() else nbytes


def _with(sentence: str, text: str) -> str:
    return f"{sentence}\ntorch_xla says: {text}"
