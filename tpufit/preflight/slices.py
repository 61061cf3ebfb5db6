"""`slice_of`: a TPU slice by the cloud's name for it, with what its devices can do and how its chips are laid out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UnknownNameError
from ..runtime import KernelWork
from ..utils.hardware import GENERATIONS, Chip


@dataclass(frozen=True)
class TPU:
    """What one device of a TPU generation can do: a core of a v2 or v3, a chip of the others.

    Attributes:
        name: The generation, e.g. `"v5e"`.
        kind: What the runtime calls it, e.g. `"TPU v5 lite"`.
        memory: Its memory, in bytes, as the vendor says.
        bandwidth: What it reads of that memory, in bytes a second.
        peak: Its matrix products in bfloat16, in operations a second.
        clock: Its cycles a second.
        links: What it sends to others over its links between chips, in bytes a second, all links together.
        price: Its list price, in US dollars an hour.
        flags: The flags that torch_xla starts this generation with, besides those of all.
        config: The name that libtpu has for the way in which torch_xla starts it: a v4's two cores as one device.
        side: The side of its matrix units, up to which the widths of a product are filled.
        halves: The cores that a device consists of; a kernel may run on one of them alone.
    """

    name: str
    kind: str
    memory: int
    bandwidth: float
    peak: float
    clock: float
    links: float
    price: float
    flags: str = ""
    config: str = "default"
    side: int = 128
    halves: int = 1

    def cycles_of(self, kernel: KernelWork) -> int:
        """The cycles of a kernel, for which the compiler has no estimate: an estimate of tpufit's own.

        It is the time of the kernel's matrix products at the chip's peak, or of its bytes at the memory's bandwidth:
        the longer of the two.
        """
        filled = math.ceil(kernel.width / self.side) * self.side / kernel.width
        arithmetic = kernel.operations * filled / self.peak * (1 if kernel.shared else self.halves)
        return round(max(arithmetic, kernel.nbytes / self.bandwidth) * self.clock)


@dataclass(frozen=True)
class Slice:
    """Chips of one generation that are rented together.

    Attributes:
        name: The cloud's name for it, e.g. `"v5e-8"`.
        chip: What each of its devices can do.
        devices: The number of devices that the runtime shows, on all hosts.
        hosts: The number of machines, each of which runs a process.
        topology: How its chips are laid out, as libtpu names it, e.g. `"v5e:2x4"`.
        chips_per_host_bounds: How those of one host are laid out, e.g. `(2, 4, 1)`.
    """

    name: str
    chip: TPU
    devices: int
    hosts: int
    topology: str
    chips_per_host_bounds: tuple[int, int, int]


# Memory and bandwidth of a chip (a v3 shows half of one): docs.cloud.google.com/tpu/docs/v3, v4, v5e,
# v5p-training and v6e. v2: Jouppi et al., "A Domain-Specific Supercomputer for Training Deep Neural Networks" (2020).
# Clocks: the same paper for v2 and v3; Jouppi et al., "TPU v4: An Optically Reconfigurable Supercomputer" (2023); "How
# to Scale Your Model" (jax-ml.github.io/scaling-book/tpus) for v5e. All agree with the peak over the operations of a
# cycle: two for each of the 128 x 128 places in each matrix unit, of which a device has 1, 2, 8 and 4. For v5p and v6e
# no clock is published: theirs is the peak over 262,144 and 524,288 operations a cycle, which libtpu's estimates of a
# large product come near.
# Links: the same pages. Half of what a chip of v5e, v5p and v6e does in both directions, 400, 1,200 and 800 GB/s; for
# v3 and v4 what a pod adds up, 340 TB/s and 1.1 PB/s, by its 1,024 and 4,096 chips (for v5e and v6e the two are the
# same). v2: four links of 496 Gbit/s a chip, by the same paper; no page of the vendor has it.
# Prices: what the cloud asks on demand in us-central1 (v4: us-central2), of cloud.google.com/tpu/pricing as
# github.com/skypilot-org/skypilot-catalog has it, catalogs/v8/gcp/vms.csv at 006059e. Other regions ask up to 43 %
# more, and a v2 on more than one host is a third dearer.
_V5_FLAGS = "--xla_enable_async_all_gather=true --xla_enable_async_collective_permute=true"


def _tpu(name: str, kind: str, **does: Any) -> TPU:
    chip = GENERATIONS[name]
    assert chip.peak is not None
    return TPU(name, kind, chip.memory << 30, peak=chip.peak, **does)


_V2 = _tpu("v2", "TPU v2", bandwidth=350e9, clock=0.7e9, links=124e9, price=0.5625)
_V3 = _tpu("v3", "TPU v3", bandwidth=450e9, clock=0.94e9, links=166e9, price=1.0)
_V4 = _tpu("v4", "TPU v4", bandwidth=1200e9, clock=1.05e9, links=269e9, price=3.22, config="megacore_dense", halves=2)
_V5E = _tpu("v5e", "TPU v5 lite", bandwidth=819e9, clock=1.5e9, links=200e9, price=1.2, flags=_V5_FLAGS)
_V5P = _tpu("v5p", "TPU v5", bandwidth=2765e9, clock=1.75e9, links=600e9, price=4.2, flags=_V5_FLAGS, halves=2)
_V6E = _tpu("v6e", "TPU v6 lite", bandwidth=1600e9, clock=1.75e9, links=400e9, price=2.7, side=256)

_FLAT = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_DEEP = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x4x12 4x8x8 8x8x8 8x8x12 8x8x16 8x16x16"
# The chips of each slice that is to be had. Sources: cloud.google.com/tpu/docs/v2 and v3 (sizes), torch_xla 2.9's
# _internal/tpu.py (their hosts), the pages of v5e, v5p and v6e; v4: MaxText's accelerator_to_spec_map.py.
_SHAPES = {
    _V2: "2x2 4x4 8x8 8x16 16x16",
    _V3: "2x2 4x4 4x8 8x8 8x16 16x16 16x32 32x32",
    _V4: _DEEP,
    _V5E: _FLAT,
    _V5P: f"{_DEEP} 16x16x16 16x16x24",
    _V6E: _FLAT,
}
_NAMED_BY_CHIPS = (_V5E, _V6E)  # the others by their TensorCores, of which a chip has two
# The chips of a host; (2, 2, 1) for all other shapes.
_SINGLE_HOSTS = {"1x1": (1, 1, 1), "2x4": (2, 4, 1)}


def _laid_out(chip: TPU, shape: str) -> Slice:
    chips = math.prod(map(int, shape.split("x")))
    bounds = _SINGLE_HOSTS.get(shape, (2, 2, 1))
    return Slice(
        name=f"{chip.name}-{chips if chip in _NAMED_BY_CHIPS else 2 * chips}",
        chip=chip,
        devices=chips * GENERATIONS[chip.name].devices,
        hosts=chips // math.prod(bounds),
        topology=f"{chip.name}:{shape}",
        chips_per_host_bounds=bounds,
    )


SLICES = {
    found.name: found for chip, shapes in _SHAPES.items() for found in (_laid_out(chip, s) for s in shapes.split())
}


def slice_of(name: str) -> Slice:
    """Find a TPU slice by the cloud's name for it, e.g. `"v3-8"`, `"v5e-8"` or `"v5litepod-8"`, which is the same.

    The number is that of the chips for v5e and v6e, and that of the TensorCores, two a chip, for the others.

    Raises:
        UnknownNameError: There is no such slice.

    Example:
        >>> found = slice_of("v4-8")
        >>> found.topology, found.devices, found.hosts
        ('v4:2x2x1', 4, 1)
    """
    asked = str(name).strip().lower().replace("v5litepod-", "v5e-")
    if asked in SLICES:
        return SLICES[asked]
    generation = asked.partition("-")[0]
    known = [other for other, found in SLICES.items() if found.chip.name == generation]
    counted = "its chips" if generation in ("v5e", "v6e") else "its TensorCores, two a chip"
    hint = f"The number of a {generation} is that of {counted}." if known else "Write a generation and a number."
    raise UnknownNameError("TPU slice", name, known or SLICES, hint)


def slice_with(chips: Sequence[Chip], devices: int, memory: int) -> Slice | None:
    """Find the slice that a host's chips are, or are a part of; None if no slice has so many devices, over all hosts.

    The memory of each, in bytes, tells a v2 from a v3.

    Example:
        >>> slice_with([GENERATIONS["v5e"]] * 8, 8, 17 << 30).name
        'v5e-8'
    """
    names = {name for chip in chips[:1] for name in chip.name.split(" or ")}
    fitting = [found for found in SLICES.values() if found.chip.name in names and found.devices == devices]
    return min(fitting, key=lambda found: abs(found.chip.memory - memory), default=None)
