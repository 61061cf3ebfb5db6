"""The chips of an absent slice, for which JAX compiles programs."""

from __future__ import annotations

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from tpufit.preflight.tpu_slices import Slice


def mesh_of(on: Slice) -> Mesh:
    """Return the slice's cores as one axis, `"data"`."""
    chips = topologies.get_topology_desc(
        platform="tpu",
        topology_name=on.topology,
        chips_per_host_bounds=on.chips_per_host_bounds,
        chip_config_name=on.chip.config,
    )
    return Mesh(np.array(chips.devices[: on.devices]), ("data",))
