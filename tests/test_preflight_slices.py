"""TPU slices by name, compared with the vendors' tables."""

import pytest

from tpufit.errors import UnknownNameError
from tpufit.preflight.tpu_slices import SLICES, find_slice

# Name: chips, topology, hosts.
PUBLISHED = {
    # Sizes: cloud.google.com/tpu/docs/v2 and v3. Hosts, of 2x2 chips: torch_xla 2.9, _internal/tpu.py.
    "v2-8": (4, "2x2", 1),
    "v2-32": (16, "4x4", 4),
    "v2-128": (64, "8x8", 16),
    "v2-256": (128, "8x16", 32),
    "v2-512": (256, "16x16", 64),
    "v3-8": (4, "2x2", 1),
    "v3-32": (16, "4x4", 4),
    "v3-64": (32, "4x8", 8),
    "v3-128": (64, "8x8", 16),
    "v3-256": (128, "8x16", 32),
    "v3-512": (256, "16x16", 64),
    "v3-1024": (512, "16x32", 128),
    "v3-2048": (1024, "32x32", 256),
    # github.com/AI-Hypercomputer/maxtext, accelerator_to_spec_map.py
    "v4-8": (4, "2x2x1", 1),
    "v4-16": (8, "2x2x2", 2),
    "v4-32": (16, "2x2x4", 4),
    "v4-64": (32, "2x4x4", 8),
    "v4-128": (64, "4x4x4", 16),
    "v4-256": (128, "4x4x8", 32),
    "v4-384": (192, "4x4x12", 48),
    "v4-512": (256, "4x8x8", 64),
    "v4-1024": (512, "8x8x8", 128),
    "v4-1536": (768, "8x8x12", 192),
    "v4-2048": (1024, "8x8x16", 256),
    "v4-4096": (2048, "8x16x16", 512),
    # cloud.google.com/tpu/docs/v5e. Its hosts are machines of 8 chips; slices of several are rented as
    # ct5lp-hightpu-4t, so with 4 chips each (github.com/AI-Hypercomputer/xpk, system_characteristics.py).
    "v5e-1": (1, "1x1", 1),
    "v5e-4": (4, "2x2", 1),
    "v5e-8": (8, "2x4", 1),
    "v5e-16": (16, "4x4", 4),
    "v5e-32": (32, "4x8", 8),
    "v5e-64": (64, "8x8", 16),
    "v5e-128": (128, "8x16", 32),
    "v5e-256": (256, "16x16", 64),
    # cloud.google.com/tpu/docs/v5p; 2x2x4, 4x4x12 and 8x8x12: MaxText, as for v4
    "v5p-8": (4, "2x2x1", 1),
    "v5p-16": (8, "2x2x2", 2),
    "v5p-32": (16, "2x2x4", 4),
    "v5p-64": (32, "2x4x4", 8),
    "v5p-128": (64, "4x4x4", 16),
    "v5p-256": (128, "4x4x8", 32),
    "v5p-384": (192, "4x4x12", 48),
    "v5p-512": (256, "4x8x8", 64),
    "v5p-1024": (512, "8x8x8", 128),
    "v5p-1536": (768, "8x8x12", 192),
    "v5p-2048": (1024, "8x8x16", 256),
    "v5p-4096": (2048, "8x16x16", 512),
    "v5p-8192": (4096, "16x16x16", 1024),
    "v5p-12288": (6144, "16x16x24", 1536),
    # cloud.google.com/tpu/docs/v6e, whose column "VMs" counts hosts
    "v6e-1": (1, "1x1", 1),
    "v6e-4": (4, "2x2", 1),
    "v6e-8": (8, "2x4", 1),
    "v6e-16": (16, "4x4", 4),
    "v6e-32": (32, "4x8", 8),
    "v6e-64": (64, "8x8", 16),
    "v6e-128": (128, "8x16", 32),
    "v6e-256": (256, "16x16", 64),
    # axlearn/experiments/aot_compilation.py, where it is called tpu7x
    "v7x-2": (1, "1x1x1", 1),
    "v7x-8": (4, "2x2x1", 1),
    "v7x-16": (8, "2x2x2", 2),
    "v7x-32": (16, "2x2x4", 4),
    "v7x-64": (32, "2x4x4", 8),
    "v7x-128": (64, "4x4x4", 16),
    "v7x-256": (128, "4x4x8", 32),
    "v7x-384": (192, "4x4x12", 48),
    "v7x-512": (256, "4x8x8", 64),
    "v7x-1024": (512, "8x8x8", 128),
    "v7x-1536": (768, "8x8x12", 192),
    "v7x-2048": (1024, "8x8x16", 256),
    "v7x-4096": (2048, "8x16x16", 512),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_slices_equal_the_published_tables(name):
    generation = name.partition("-")[0]
    chips, topology, hosts = PUBLISHED[name]
    found = find_slice(name)
    family = "tpu7x" if generation == "v7x" else generation
    assert (found.name, found.chip.name, found.topology) == (name, generation, f"{family}:{topology}")
    assert (found.devices, found.hosts) == (chips * (2 if generation in ("v2", "v3", "v7x") else 1), hosts)


def test_every_slice_is_published():
    assert set(SLICES) == set(PUBLISHED)


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        *(("v3-8", (2, 2, 1)), ("v5e-1", (1, 1, 1)), ("v5e-8", (2, 4, 1)), ("v6e-16", (2, 2, 1)), ("v4-64", (2, 2, 1))),
        *(("v7x-2", (1, 1, 1)), ("v7x-8", (2, 2, 1))),
    ],
)
def test_the_chips_of_a_host(name, bounds):
    assert find_slice(name).chips_per_host_bounds == bounds


@pytest.mark.parametrize("name", ["v5litepod-8", "V5E-8", " v5e-8 "])
def test_alternative_names(name):
    assert find_slice(name) is find_slice("v5e-8")
    assert find_slice("tpu7x-8") is find_slice("v7x-8")


# A device's matrix units, and the side of one: cloud.google.com/tpu/docs, the page of each generation. Of a v7x no page
# says so: libtpu 0.0.51 estimates 445,000 operations a cycle for a product of 16,384 x 16,384.
@pytest.mark.parametrize(
    ("name", "units", "side"),
    [("v2-8", 1, 128), ("v3-8", 2, 128), ("v4-8", 8, 128), ("v5e-8", 4, 128), ("v5p-8", 8, 128), ("v6e-8", 4, 256),
     ("v7x-8", 4, 256)],
)  # fmt: skip
def test_the_clock_fits_the_peak(name, units, side):
    chip = find_slice(name).chip
    assert chip.clock * 2 * units * side**2 == pytest.approx(chip.peak, rel=0.005)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "v4-4",
            "unknown TPU slice 'v4-4': .* The number of a v4 counts its TensorCores, two per chip. Known: v4-1024",
        ),
        ("v5e-12", "The number of a v5e counts its chips. Known: v5e-1, v5e-128, "),
        ("v5-8", "did you mean 'v5p-8' or 'v5e-8'.* Write a generation and a number. Known: v2-128, "),
        (8, "Write a generation and a number."),
    ],
)
def test_an_unknown_name_is_an_error_with_suggestions(name, said):
    with pytest.raises(UnknownNameError, match=said):
        find_slice(name)
