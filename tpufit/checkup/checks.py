"""The checks: functions from facts to rows, with a one-sentence cure for each fault."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import VersionError, say_count
from ..utils import releases
from ..utils.hardware import describe_processes, find_retired_variables
from ..utils.text import format_bytes
from .facts import Facts
from .trial import ALL, Trial

# Variables of XRT, the runtime before PJRT, which torch_xla dropped in 2.1.
_XRT = ("XRT_TPU_CONFIG", "XRT_WORKERS", "XRT_DEVICE_MAP", "XRT_SHARD_WORLD_SIZE", "TPU_IP_ADDRESS", "COLAB_TPU_ADDR")
_MULTIPROCESS = ("TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID", "TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS")
_LIMITING = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "CPU_NUM_DEVICES")
_SLOWING = ("PT_XLA_DEBUG", "PT_XLA_DEBUG_LEVEL", "XLA_HLO_DEBUG", "XLA_IR_DEBUG", "XLA_USE_EAGER_DEBUG_MODE")
_SHARDING = ("XLA_USE_SPMD", "XLA_AUTO_SPMD", "XLA_AUTO_SPMD_MESH")

_CHOOSING_A_TPU = {
    "Kaggle": "Settings > Accelerator > TPU, and restart the session",
    "Colab": "Runtime > Change runtime type > a TPU",
}

TPU_PROCESSES = "processes on the TPU"  # the row whose text contains the commands of others

_LITTLE_MEMORY = 4 << 30
_LITTLE_DISK = 5 << 30
_SLOW_LINK = 1e9  # bytes per second


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: What was checked.
        status: `"ok"`, `"warning"` or `"error"`.
        found: Its state.
        cure: The cure; "" if there is no fault.
    """

    name: str
    status: str
    found: str
    cure: str = ""


def _make_row(name: str, found: str, *, error: str = "", warning: str = "") -> Row:
    """Make a row, whose status is `"ok"` unless a cure is given."""
    return Row(name, "error" if error else "warning" if warning else "ok", found, error or warning)


def check_python(facts: Facts) -> Iterator[Row]:
    """Check the version of Python."""
    supported = (3, 10) <= facts.python[:2] <= (3, 13)
    cure = "" if supported else "the releases of torch and its runtimes that tpufit supports need Python 3.10 to 3.13"
    yield _make_row("Python", ".".join(map(str, facts.python)), error=cure)


def check_versions(facts: Facts) -> Iterator[Row]:
    """Check that the versions of torch and its runtime work together."""
    names = ("torch", *releases.RUNTIMES)
    runtimes = [name for name in releases.RUNTIMES if facts.versions.get(name)] or ["torch_xla"]
    found = ", ".join(f"{name} {facts.versions.get(name) or 'missing'}" for name in ("torch", *runtimes))
    if facts.gpus and not facts.chips and not any(map(facts.versions.get, releases.RUNTIMES)):
        yield _make_row("torch", f"torch {facts.versions.get('torch') or 'missing'}, which is enough for a GPU")
        return
    try:
        releases.check_versions(*map(facts.versions.get, names))
        cure = ""
    except VersionError as error:
        cure = str(error)
    yield _make_row(f"torch and {runtimes[0]}", found, error=cure)


def check_libtpu(facts: Facts) -> Iterator[Row]:
    """Check that libtpu is installed, in a tested version."""
    version = facts.versions.get("libtpu")
    install = releases.make_install_command(facts.versions, "libtpu")
    if version is None:
        cure = f"{install}: without libtpu the TPU is not found" if facts.chips else ""
        yield _make_row("libtpu", "not installed" + ("" if facts.chips else "; only a TPU needs it"), error=cure)
        return
    # A version with which a training ran is fine; without a TPU this is unknown.
    unproven = facts.chips and not any(trial.ran_on for trial in facts.trials)
    if releases.is_tested_libtpu(facts.versions) or not unproven:
        yield _make_row("libtpu", version)
        return
    runtime = "torch_tpu" if facts.versions.get("torch_tpu") else "torch_xla"
    with_it = f"{runtime} {facts.versions.get(runtime)}"
    cure = f"tpufit is untested with this version and {with_it}; if training doesn't start: {install}"
    yield _make_row("libtpu", version, warning=cure)


def check_compiler(facts: Facts) -> Iterator[Row]:
    """Check that the TPU's compiler, which preflight needs, is complete and tested."""
    found = {name: facts.versions.get(name) for name in releases.COMPILER}
    here = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    missing = releases.list_missing(found)
    if missing and found["jax"] is None and found["jaxlib"] is None:
        yield _make_row("the TPU's compiler", "not installed; only preflight needs it")
    elif missing:
        cure = f"preflight needs {' and '.join(missing)} too: {releases.make_install_command(facts.versions)}"
        yield _make_row("the TPU's compiler", here, warning=cure)
    else:
        known = "" if releases.is_tested(facts.versions) else "; untested with this torch_xla, but preflight will try"
        yield _make_row("the TPU's compiler", here + known)


def check_tensorflow(facts: Facts) -> Iterator[Row]:
    """Check that no TensorFlow takes the TPU."""
    version = facts.versions.get("tensorflow")
    cure = (
        "it loads libtpu, too, and the first process to do so keeps the TPU: pip uninstall -y tensorflow && pip "
        "install tensorflow-cpu, or don't import it before fit (if you must, set TPU_LOAD_LIBRARY=0)"
    )
    found = f"tensorflow {version}" if version else "none that takes the TPU"
    yield _make_row("TensorFlow", found, warning=cure if version else "")


def check_device(facts: Facts) -> Iterator[Row]:
    """Check which device a training will use."""
    requested = facts.environ.get("PJRT_DEVICE")
    if facts.chips:
        chip = facts.chips[0]
        cores = sum(chip.devices for chip in facts.chips)
        count = f"{say_count(len(facts.chips), 'chip')}, {say_count(cores, 'core')}"
        found = f"TPU {chip.name}: {count} of at least {chip.memory} GB each"
        cure = "" if requested in (None, "TPU") else f"PJRT_DEVICE={requested!r} leaves the TPU idle: unset it"
        yield _make_row("device", f"{found}; on {facts.place}", warning=cure)
        return
    found = f"no TPU on the PCI bus; on {facts.place}"
    if facts.gpus and requested is None:
        yield _make_row("device", f"{say_count(facts.gpus, 'NVIDIA GPU')}, of which training uses one; {found}")
        return
    if requested == "TPU":
        yield _make_row(
            "device", found, error="PJRT_DEVICE=TPU requires a TPU: choose a machine with a TPU, or unset it"
        )
    else:
        cure = _CHOOSING_A_TPU.get(facts.place, "")
        yield _make_row("device", f"{found}: training runs on virtual cores of the CPU", warning=cure)


def check_hosts(facts: Facts) -> Iterator[Row]:
    """Check that the names of a pod's hosts can be resolved."""
    pod = facts.process.pod
    if pod.activity:
        yield _make_row("hosts now", pod.activity)
    if len(pod.names) < 2:
        return
    own = facts.environ.get("TPU_WORKER_ID", "")
    number = f"host {own} of {len(pod.names)}" if own else f"one of {len(pod.names)} hosts"
    chips = say_count(len(facts.chips), "chip")
    found = f"{number} of a pod, each with {chips}; a training is tried only on all of them together"
    cure = f"missing: {', '.join(pod.missing)}. Their names can't be resolved: start all hosts before the script"
    yield _make_row("hosts", found, error=cure if pod.missing else "")


def check_variables(facts: Facts) -> Iterator[Row]:
    """Find environment variables that hinder training."""
    leftover = "left over from a run of several processes; here fit removes the first two before it starts"
    retired = (
        "torch_xla obeys some of these without PyTorch knowing it, and ignores the others: unset them, and use "
        "compile(precision='bf16')"
    )
    divided = "these divide the TPU among several processes, and tpufit uses one: unset them, or the start may hang"
    for names, cure in (
        (_XRT, "these were for XRT, which torch_xla dropped: unset them. Only PJRT_DEVICE=TPU is needed"),
        (_MULTIPROCESS, leftover if facts.place == "Kaggle" and facts.chips else divided),
        (_LIMITING, "this process doesn't see all cores: unset it if you want them"),
        (_SHARDING, "tpufit divides batches itself, and these interfere: unset them"),
        (_SLOWING, "these make every step slow: unset them after debugging"),
        (tuple(find_retired_variables(facts.environ)), retired),
    ):
        if found := ", ".join(f"{name}={facts.environ[name]}" for name in names if facts.environ.get(name)):
            yield _make_row("environment", found, warning=cure)


def check_holders(facts: Facts) -> Iterator[Row]:
    """Find other processes that use the TPU."""
    others = {pid: command for pid, command in facts.holders.items() if pid != facts.process.pid}
    cure = "a TPU serves one process: end the others yourself (kill, or restart their notebook); doctor ends nothing"
    visible = "this process" if facts.holders else "no process that this user can see"
    yield _make_row(TPU_PROCESSES, describe_processes(others) or visible, error=cure if others else "")


def check_process(facts: Facts) -> Iterator[Row]:
    """Check that this process can still choose its cores."""
    if facts.process.imported_xla:
        why = "a process that has computed on one device can't use several. If in doubt, restart the kernel"
        cure = f"don't touch torch_xla before tpufit (xla_device(), .to('xla')): {why}"
        yield _make_row("this process", "torch_xla was imported before tpufit needed it", warning=cure)
    elif facts.process.cores:
        yield _make_row(
            "this process", f"already computes on {facts.process.cores}, so no training was tried in a separate process"
        )


def check_memory(facts: Facts) -> Iterator[Row]:
    """Check the host's memory."""
    limit = min(facts.memory, key=facts.memory.__getitem__)
    least = facts.memory[limit]
    cure = "importing torch and compiling take about 2 GiB, and data more: raise the limit, or use a machine with more"
    status = {"error" if least < _LITTLE_MEMORY // 2 else "warning": cure} if least < _LITTLE_MEMORY else {}
    yield _make_row("host memory", f"{format_bytes(least)} by {limit}", **status)


def check_cpus(facts: Facts) -> Iterator[Row]:
    """Check the number of CPUs."""
    enough = facts.cpus >= 2 * len(facts.chips) and facts.cpus > 1
    cure = "too few to decode data for this device: decode them once, with tpufit.data.CachedDataset"
    yield _make_row("CPUs", str(facts.cpus), warning="" if enough else cure)


def check_disk(facts: Facts) -> Iterator[Row]:
    """Check the free disk space."""
    cure = "too little for caches and checkpoints: make room, or put them elsewhere"
    yield _make_row(
        "free disk", f"{format_bytes(facts.disk)} in this folder", warning=cure if facts.disk < _LITTLE_DISK else ""
    )


def check_trials(facts: Facts) -> Iterator[Row]:
    """Judge the short trainings."""
    for trial in facts.trials:
        name = "training on all cores" if trial.cores == ALL else f"training on {trial.cores} core"
        if not trial.ran_on:
            yield _make_row(name, trial.failure, error=_explain_failure(trial))
            continue
        took = f"first step {trial.first:.1f} s with compiling, then {1000 * trial.step:.2g} ms per step of a tiny net"
        yield _make_row(name, f"{trial.ran_on}: {took}")
    if measured := [trial for trial in facts.trials if trial.ran_on]:
        best = max(trial.bandwidth for trial in measured)
        slow = "slow for large batches: send bytes, and convert them to floats on the device, in device_transform"
        cure = slow if facts.chips and best < _SLOW_LINK else ""
        yield _make_row("host to device and back", f"{best / 1e9:.2g} GB/s", warning=cure)
    if sizes := [trial.memory for trial in facts.trials if trial.memory]:
        yield _make_row("device memory", format_bytes(min(sizes)))


def _explain_failure(trial: Trial) -> str:
    """Return the cure for a failed training."""
    if trial.status is None:
        return "it hangs: check above for processes on the TPU and variables of another run; then restart the TPU"
    return "follow the message above; if it gives no cure, check the rows before it, or report this text as an issue"


CHECKS = (
    check_python,
    check_versions,
    check_libtpu,
    check_compiler,
    check_tensorflow,
    check_device,
    check_hosts,
    check_variables,
    check_holders,
    check_process,
    check_memory,
    check_cpus,
    check_disk,
    check_trials,
)
