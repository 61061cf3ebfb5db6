"""Turns errors of torch_xla, XLA, libtpu and CUDA into a sentence that names the cure."""

import re

from .. import errors
from ..backend.step_memory import StepMemory
from ..errors import TpufitError, say_count
from ..utils.out_of_memory import list_remedies, parse_shortage
from ..utils.text import format_bytes, parse_bytes
from .devices import get_settled_cores
from .driver import driver

# The memory of most TPUs' cores, for errors that don't name it.
_USUAL_MEMORY = 1 << 34
# Words of XLA:CPU; XLA:TPU at compile time; libtpu when it loads a program or allocates a tensor.
_FULL = re.compile(r"RESOURCE_EXHAUSTED|out of memory|std::bad_alloc|cannot allocate memory", re.IGNORECASE)
_SCRATCH = re.compile(r"memory space (vmem|smem)")
# Words that may occur in a user's error must not be enough here.
_LOST = re.compile(
    r"halted (?:unexpectedly|prematurely)|health check failed|\b(?:UNAVAILABLE|DATA_LOSS|ABORTED): |Socket closed"
    r"|already in an error state"
)
_MESH = re.compile(r"device IDs|match mesh (?:size|dimensions)|mesh_shape", re.IGNORECASE)
_PARTITION = re.compile(r"spmd_partitioner|SPMD partition|GSPMD|hlo_sharding|[Ss]harding.propagation|tile_assignment")

_NO_KERNEL = re.compile(r"Could not run '(?:aten::)?(\S+?)' with arguments from the '(\S+?)' backend")
_ON_HOST = re.compile(r"Expected XLA tensor|not an XLA tensor|expected tensor to be on tpu, got cpu")

# The compiler's words for tensors of two float dtypes in one operation, mostly in a ValueError.
_TWO_DTYPES = re.compile(r"Seen floating point types of different precisions|mixed precision is disallowed")

_OTHERS: tuple[tuple[re.Pattern[str], type[TpufitError], str], ...] = (
    (
        _LOST,
        errors.DeviceLostError,
        "the device was lost while it computed. Restart the process (in a notebook: the kernel) and resume from the "
        "last checkpoint; if it happens again, restart the TPU, or get another: python -m tpufit doctor checks it",
    ),
    (
        _PARTITION,
        errors.PartitionError,
        "XLA could not split this step over the cores. Find the operation with cores=1, where nothing is split, "
        "and fewer layers; unset XLA_AUTO_SPMD and XLA_AUTO_SPMD_MESH if they are set; a metric that causes it can be "
        "computed from model.predict(...) instead",
    ),
    (
        _TWO_DTYPES,
        errors.BatchError,
        "an operation of the step computes with tensors of two dtypes, which PyTorch refuses. Give it rows in the "
        "dtype of the weights: compile(..., precision='bf16-true') makes both bfloat16, and module.float() the "
        "weights float32",
    ),
    (
        _ON_HOST,
        errors.PlacementError,
        "a step computes with a tensor that is on the host. Besides the batch, these move to the device: modules and "
        "parameters among the attributes of the Model, in lists and dicts too (self.teacher = teacher), with their "
        "buffers, and the loss of compile",
    ),
)


def extract_message(error: BaseException) -> str:
    """Return the text of an error of the runtime for users."""
    return driver().extract_message(error)


def translate(error: BaseException, memory: StepMemory | None = None) -> TpufitError | None:
    """Translate an error of the runtime into an error of tpufit that includes the runtime's text. Raise it `from error`.

    Args:
        error: The error that torch_xla raised while a step was compiled or run.
        memory: The memory that the step needs, if known.

    Returns:
        The error to raise, or None for an unknown error, which the caller should leave unchanged.

    Example:
        >>> print(translate(RuntimeError("INTERNAL: Core halted unexpectedly")))
        the device was lost while it computed. Restart the process (in a notebook: the kernel) and resume from the last checkpoint; if it happens again, restart the TPU, or get another: python -m tpufit doctor checks it
        torch_xla says: INTERNAL: Core halted unexpectedly
        >>> translate(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    """  # noqa: E501
    if isinstance(error, TpufitError) or not isinstance(error, (RuntimeError, AssertionError, ValueError)):
        return None
    text = extract_message(error)
    if isinstance(error, ValueError) and not _TWO_DTYPES.search(text):
        return None
    if (missing := _NO_KERNEL.search(text)) is not None:
        kind = "sparse tensors" if missing[2].startswith("Sparse") else f"tensors of {missing[2]}"
        return errors.DeviceError(
            f"{driver().name} has no operation {missing[1]} for {kind}. Make the tensor dense (to_dense(), "
            "sparse=False), do this in the data set, or in a callback"
        )
    if _SCRATCH.search(text):  # before `_FULL`, which matches these texts too
        sentence = (
            "an operation needs more scratch memory than a core has, which is a fault of the compiler, not of the "
            "batch size. Try another size of the layer that the text below names, or set "
            "LIBTPU_INIT_ARGS=--xla_tpu_scoped_vmem_limit_kib=65536 before the start"
        )
        return errors.OutOfMemoryError(add_runtime_text(sentence, text))
    if _FULL.search(text):
        return errors.OutOfMemoryError(add_runtime_text(_explain_full_memory(text, memory), text))
    if _MESH.search(text) and isinstance(error, AssertionError):
        sentence = (
            "the runtime's cores differ from the cores that tpufit has settled. Other code has changed them in this "
            "process: restart it (in a notebook: the kernel), and let tpufit.init() set the cores"
        )
        return errors.CoresError(add_runtime_text(sentence, text))
    return next(
        (kind(add_runtime_text(sentence, text)) for known, kind, sentence in _OTHERS if known.search(text)), None
    )


def _explain_full_memory(text: str, memory: StepMemory | None) -> str:
    """Make the sentence for a full memory."""
    found = parse_shortage(text)
    if found.needed:
        need = f": it needs {_make_legible(found.needed)} of {_make_legible(found.available)}"
    elif found.free:
        need = f": it requested {_make_legible(found.requested)} more, and {_make_legible(found.free)} are free"
    elif found.requested:
        need = f": it requested {_make_legible(found.requested)} more"
    else:
        need = ""
    if memory is None:
        return f"the device has no room{need}. Take a smaller batch_size"
    rows_per_core = -(-memory.rows // memory.cores)
    if memory.role == "train":
        have = (
            f"weights {format_bytes(memory.weights)}, optimizer {format_bytes(memory.optimizer)}, gradients "
            f"{format_bytes(memory.learns)}, batch {format_bytes(memory.batch)}; the rest are activations"
        )
        state = memory.weights + memory.optimizer + memory.learns
        room = parse_bytes(found.available) if found.available else _USUAL_MEMORY
        cures = list_remedies(state, max(room, state), rows_per_core, memory.cores, memory.split, memory.remat)
        cures += ["compile(precision='bf16')"] if memory.precision == "fp32" else []
        cures += ["an optimizer with less state"] if memory.optimizer > memory.weights else []
    else:
        have = f"weights {format_bytes(memory.weights)}, batch {format_bytes(memory.batch)}"
        have += "; the rest are activations and outputs"
        cures = [f"a smaller batch_size, such as {max(1, rows_per_core // 2)}"]
    step = f"a {memory.role} step of {say_count(rows_per_core, 'row')} per core"
    return f"the device has no room for {step}{need}. On each core are {have}. Try {', or '.join(cures)}"


def _make_legible(nbytes: str) -> str:
    return format_bytes(int(nbytes)) if nbytes.isdecimal() else nbytes


def add_runtime_text(sentence: str, text: str) -> str:
    cores = get_settled_cores()
    who = "PyTorch" if cores is not None and cores.platform == "CUDA" else driver().name
    return f"{sentence}\n{who} says: {text}"
