"""`find_slice`: finds a TPU slice by its name in the cloud, with its devices' capabilities and its chips' topology."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UnknownNameError
from ..runtime import KernelWork
from ..utils.hardware import GENERATIONS, Chip


@dataclass(frozen=True)
class TPU:
    """The capabilities of one device of a TPU generation: a core of a v2 or v3, a chip of later generations.

    Attributes:
        name: The generation, e.g. `"v5e"`.
        kind: The runtime's name of it, e.g. `"TPU v5 lite"`.
        memory: Its memory, in bytes, according to the vendor.
        bandwidth: The bandwidth of this memory, in bytes per second.
        peak: Its peak for matrix products in bfloat16, in operations per second.
        clock: Its cycles per second.
        links: The bandwidth of its links to other chips, in bytes per second, all links together.
        price: Its list price, in US dollars an hour; None if none is published.
        flags: The flags with which torch_xla starts only this generation.
        flags_of_torchtpu: The flags of this generation for a preflight with TorchTPU.
        config: libtpu's name for the mode in which torch_xla starts it, e.g. a v4's two cores as one device.
        side: The side of its matrix units, to which the widths of a product are padded.
        halves: The number of cores in a device; a kernel may run on only one of them.
        family: libtpu's name of the generation, if it differs from `name`.
        runtime: The only runtime whose compiler knows it, e.g. `"torch_tpu"`; by default all do.
    """

    name: str
    kind: str
    memory: int
    bandwidth: float
    peak: float
    clock: float
    links: float
    price: float | None
    flags: str = ""
    flags_of_torchtpu: str = ""
    config: str = "default"
    side: int = 128
    halves: int = 1
    family: str = ""
    runtime: str = ""

    def estimate_cycles(self, kernel: KernelWork) -> int:
        """Estimate the cycles of a kernel, for which the compiler has no estimate.

        The estimate is the longer of two times: of the kernel's matrix products at the chip's peak, and of its bytes at
        the memory's bandwidth.
        """
        padding = math.ceil(kernel.width / self.side) * self.side / kernel.width
        arithmetic = kernel.operations * padding / self.peak * (1 if kernel.shared else self.halves)
        return round(max(arithmetic, kernel.nbytes / self.bandwidth) * self.clock)


@dataclass(frozen=True)
class Slice:
    """Chips of one generation that are rented together.

    Attributes:
        name: Its name in the cloud, e.g. `"v5e-8"`.
        chip: The capabilities of each device.
        devices: The number of devices in the runtime, on all hosts.
        hosts: The number of machines, each of which runs a process.
        topology: libtpu's name of its topology, e.g. `"v5e:2x4"`.
        chips_per_host_bounds: The topology of one host's chips, e.g. `(2, 4, 1)`.
    """

    name: str
    chip: TPU
    devices: int
    hosts: int
    topology: str
    chips_per_host_bounds: tuple[int, int, int]


# Memory and bandwidth of a chip (a v3 and a v7x show half of one): docs.cloud.google.com/tpu/docs/v3, v4, v5e,
# v5p-training, v6e and tpu7x. v2: Jouppi et al., "A Domain-Specific Supercomputer for Training Deep Neural Networks"
# (2020).
# Clocks: the same paper for v2 and v3; Jouppi et al., "TPU v4: An Optically Reconfigurable Supercomputer" (2023); "How
# to Scale Your Model" (jax-ml.github.io/scaling-book/tpus) for v5e. All agree with the peak divided by the operations
# of a cycle: two for each of the 128 x 128 cells of a matrix unit, with 1, 2, 8 and 4 units in a device. For v5p,
# v6e and v7x no clock is published: it is the peak divided by 262,144, 524,288 and 524,288 operations a cycle, which
# nearly matches libtpu's estimates of a large product.
# Links: the same pages. For v5e, v5p, v6e and v7x, half of a chip's bandwidth in both directions, 400, 1,200, 800 and
# 1,200 GB/s; for v3 and v4 the total of a pod, 340 TB/s and 1.1 PB/s, divided by its 1,024 and 4,096 chips (for v5e
# and v6e both methods agree). v2: four links of 496 Gbit/s per chip, from the same paper; no page of the vendor has it.
# Prices: on demand in us-central1 (v4: us-central2), from cloud.google.com/tpu/pricing as copied by
# github.com/skypilot-org/skypilot-catalog, catalogs/v8/gcp/vms.csv at 006059e. Other regions cost up to 43 % more, and
# a v2 on more than one host costs a third more.
_V5_FLAGS = "--xla_enable_async_all_gather=true --xla_enable_async_collective_permute=true"
# jaxlib 0.10.2 can't read a program of which libtpu 0.0.51 has given parts to the chip's SparseCores.
_WITHOUT_SPARSE_CORES = " ".join(
    f"--xla_tpu_{option}=false"
    for option in (
        "offload_gather_to_sparsecore",
        *(
            f"enable_offloading_{operation}_to_sparsecore"
            for operation in (
                *("copy", "dynamic_padding", "gather", "reduce", "reshape", "scatter", "slice", "sort", "xprecision"),
            )
        ),
        *(
            f"enable_sparse_core_collective_offload_{collective}"
            for collective in ("all_reduce", "all_gather", "reduce_scatter")
        ),
    )
)


def _tpu(name: str, kind: str, **does: Any) -> TPU:
    chip = GENERATIONS[name]
    assert chip.peak is not None
    return TPU(name, kind, chip.memory << 30, peak=chip.peak, **does)


_V2 = _tpu("v2", "TPU v2", bandwidth=350e9, clock=0.7e9, links=124e9, price=0.5625)
_V3 = _tpu("v3", "TPU v3", bandwidth=450e9, clock=0.94e9, links=166e9, price=1.0)
_V4 = _tpu("v4", "TPU v4", bandwidth=1200e9, clock=1.05e9, links=269e9, price=3.22, config="megacore_dense", halves=2)
_V5E = _tpu("v5e", "TPU v5 lite", bandwidth=819e9, clock=1.5e9, links=200e9, price=1.2, flags=_V5_FLAGS)
_V5P = _tpu(
    "v5p",
    "TPU v5",
    bandwidth=2765e9,
    clock=1.75e9,
    links=600e9,
    price=4.2,
    flags=_V5_FLAGS,
    flags_of_torchtpu=_WITHOUT_SPARSE_CORES,
    halves=2,
)
_V6E = _tpu(
    "v6e",
    "TPU v6 lite",
    bandwidth=1600e9,
    clock=1.75e9,
    links=400e9,
    price=2.7,
    flags_of_torchtpu=_WITHOUT_SPARSE_CORES,
    side=256,
)
_V7X = _tpu(
    "v7x",
    "TPU7x",
    bandwidth=3690e9,
    clock=2.2e9,
    links=300e9,
    price=None,
    side=256,
    flags_of_torchtpu=_WITHOUT_SPARSE_CORES,
    family="tpu7x",
    runtime="torch_tpu",
)

_FLAT = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_DEEP = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x4x12 4x8x8 8x8x8 8x8x12 8x8x16 8x16x16"
# The chips of each available slice. Sources: cloud.google.com/tpu/docs/v2 and v3 (sizes), torch_xla 2.9's
# _internal/tpu.py (their hosts), the pages of v5e, v5p and v6e; v4: MaxText's accelerator_to_spec_map.py; v7x:
# axlearn's experiments/aot_compilation.py.
_SHAPES = {
    _V2: "2x2 4x4 8x8 8x16 16x16",
    _V3: "2x2 4x4 4x8 8x8 8x16 16x16 16x32 32x32",
    _V4: _DEEP,
    _V5E: _FLAT,
    _V5P: f"{_DEEP} 16x16x16 16x16x24",
    _V6E: _FLAT,
    _V7X: f"1x1x1 {_DEEP}",
}
_NAMED_BY_CHIPS = (_V5E, _V6E)  # the other names count TensorCores, of which a chip has two
# The topology of a host's chips; (2, 2, 1) for all other shapes.
_SINGLE_HOSTS = {"1x1": (1, 1, 1), "1x1x1": (1, 1, 1), "2x4": (2, 4, 1)}


def _slice(chip: TPU, shape: str) -> Slice:
    chips = math.prod(map(int, shape.split("x")))
    bounds = _SINGLE_HOSTS.get(shape, (2, 2, 1))
    return Slice(
        name=f"{chip.name}-{chips if chip in _NAMED_BY_CHIPS else 2 * chips}",
        chip=chip,
        devices=chips * GENERATIONS[chip.name].devices,
        hosts=chips // math.prod(bounds),
        topology=f"{chip.family or chip.name}:{shape}",
        chips_per_host_bounds=bounds,
    )


_ALL = [_slice(chip, shape) for chip, shapes in _SHAPES.items() for shape in shapes.split()]
SLICES = {each.name: each for each in _ALL}


def find_slice(name: str) -> Slice:
    """Find a TPU slice by its name in the cloud, e.g. `"v3-8"`, or `"v5e-8"`, a synonym of `"v5litepod-8"`.

    For v5e and v6e the number counts chips, for the others TensorCores, of which a chip has two.
    `"tpu7x-8"` is a synonym of `"v7x-8"`.

    Raises:
        UnknownNameError: There is no such slice.

    Example:
        >>> found = find_slice("v4-8")
        >>> found.topology, found.devices, found.hosts
        ('v4:2x2x1', 4, 1)
    """
    asked = str(name).strip().lower().replace("v5litepod-", "v5e-").replace("tpu7x-", "v7x-")
    if asked in SLICES:
        return SLICES[asked]
    generation = asked.partition("-")[0]
    known = [other for other, found in SLICES.items() if found.chip.name == generation]
    counted = "its chips" if generation in ("v5e", "v6e") else "its TensorCores, two per chip"
    hint = f"The number of a {generation} counts {counted}." if known else "Write a generation and a number."
    raise UnknownNameError("TPU slice", name, known or SLICES, hint)


def find_slice_of_chips(chips: Sequence[Chip], devices: int, memory: int) -> Slice | None:
    """Find the slice to which a host's chips belong; None if no slice has this number of devices, on all hosts.

    The memory of a device, in bytes, distinguishes a v2 from a v3.

    Example:
        >>> find_slice_of_chips([GENERATIONS["v5e"]] * 8, 8, 17 << 30).name
        'v5e-8'
    """
    names = {name for chip in chips[:1] for name in chip.name.split(" or ")}
    fitting = [found for found in SLICES.values() if found.chip.name in names and found.devices == devices]
    return min(fitting, key=lambda found: abs(found.chip.memory - memory), default=None)
