"""Compiles programs for a TPU that isn't there, by libtpu, in a process of its own: `python compiling.py FOLDER JOB`.

It stands alone, without PyTorch and the rest of tpufit: libtpu may end the process, and takes its memory and seconds.
For each program of the job it writes `NUMBER.SLICE.json`, and the optimised program beside it as text.
"""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

# Without these libtpu looks for the TPU of this host: it asks the cloud's metadata server, and waits for its answer.
NO_HOST = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is used, so that others may use it meanwhile
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_PLATFORMS": "cpu",
}
# What torch_xla starts a TPU with, see torch_xla/__init__.py.
_FLAGS = (
    "--xla_tpu_use_enhanced_launch_barrier=false --xla_latency_hiding_scheduler_rerun=1 "
    "--xla_tpu_prefer_async_allgather_to_allreduce=true --xla_tpu_enable_flash_attention=false"
)


def annotated(hlo: bytes, arguments: list[dict[str, Any]], cores: int) -> bytes:
    """The program as MLIR, with the layout of each argument over the cores, and its leave to write over it."""
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    text = xla_client._xla.mlir.xla_computation_to_mlir_module(xla_client._xla.XlaComputation(hlo))
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        main: Any
        (main,) = (op for op in module.body.operations if ir.StringAttr(op.attributes["sym_name"]).value == "main")
        shapes = [list(ir.RankedTensorType(argument.type).shape) for argument in main.arguments]
        if shapes != [argument["shape"] for argument in arguments]:
            raise SystemExit("the program's arguments are not those that were traced")
        attributes = []
        for argument in arguments:
            own: dict[str, Any] = {"jax.buffer_donor": ir.BoolAttr.get(True)} if argument["donated"] else {}
            if cores > 1:
                own["mhlo.sharding"] = ir.StringAttr.get(sharding(argument, cores))
            attributes.append(ir.DictAttr.get(own))
        main.arg_attrs = ir.ArrayAttr.get(attributes)
        code: bytes = mlir.module_to_bytecode(module)
        return code


def as_text(hlo: bytes) -> str:
    """A program as it was traced."""
    from jax._src.lib import xla_client

    text: str = xla_client._xla.XlaComputation(hlo).get_hlo_module().to_string()
    return text


def sharding(argument: dict[str, Any], cores: int) -> str:
    """How an argument lies over the cores, in XLA's own words."""
    axis = argument["axis"]
    shape = argument["shape"]
    if axis is None or axis >= len(shape):
        return "{replicated}"
    divided = ",".join(str(cores if i == axis else 1) for i in range(len(shape)))
    return f"{{devices=[{divided}]<=[{cores}]}}"


def compile_for(devices: list[Any], module: bytes) -> Any:
    """Compile a program for some devices, which share it."""
    import numpy
    from jax._src.lib import xla_client

    options = xla_client.CompileOptions()
    options.num_replicas = 1
    options.num_partitions = len(devices)
    build = options.executable_build_options
    build.num_replicas = 1
    build.num_partitions = len(devices)
    build.use_spmd_partitioning = len(devices) > 1
    build.allow_spmd_sharding_propagation_to_output = [True]
    build.device_assignment = xla_client.DeviceAssignment.create(numpy.arange(len(devices)).reshape(1, -1))
    return devices[0].client.compile(module, xla_client._xla.DeviceList(tuple(devices)), options)


def figures(program: Any) -> dict[str, Any]:
    """The compiler's own figures of a program."""
    stats = program.get_compiled_memory_stats()
    cost = program.cost_analysis()
    names = ("argument", "output", "alias", "temp", "generated_code")
    return {
        "memory": {name: getattr(stats, f"{name}_size_in_bytes") for name in names},
        "flops": cost.get("flops", 0.0),
        "bytes": cost.get("bytes accessed", 0.0),
        "loops": of_loops(program.hlo_modules()[0].to_string()),
    }


def of_loops(text: str) -> dict[str, dict[str, float]]:
    """The figures of each loop's body, taken once, by its name. Those of the whole program take it once, too."""
    from jax._src.lib import xla_client

    found: dict[str, dict[str, float]] = {}
    for body in re.findall(r" while\(.*body=%([^,\s]+)", text):
        # A program of its own, of all that stands before it, which is all that it may call.
        begin = text.index(f"\n%{body} (")
        end = text.index("\n}", begin) + 2
        alone = f"HloModule body\n{text[text.index(chr(10)) : begin]}\n\nENTRY {text[begin + 1 : end]}"
        module = xla_client._xla.hlo_module_from_text(alone)
        cost = xla_client._xla.hlo_module_cost_analysis(xla_client.make_cpu_client(), module)
        found[body] = {"flops": cost.get("flops", 0.0), "bytes": cost.get("bytes accessed", 0.0)}
    return found


def main(folder: Path, job: dict[str, Any]) -> None:
    """Compile the programs of a job one after the other, and write what the compiler says of each."""
    from jax.experimental import topologies

    chips: Any = topologies.get_topology_desc(
        platform="tpu",
        topology_name=job["topology"],
        chips_per_host_bounds=tuple(job["chips_per_host_bounds"]),
        chip_config_name=job["config"],
    )
    for number, program in job["programs"].items():
        if not (folder / f"{number}.before.txt").exists():
            (folder / f"{number}.before.txt").write_text(as_text((folder / f"{number}.hlo").read_bytes()))
        name = f"{number}.{job['slice']}"
        module = annotated((folder / f"{number}.hlo").read_bytes(), program["arguments"], job["cores"])
        began = time.perf_counter()
        try:
            compiled = compile_for(chips.devices[: job["cores"]], module)
        except Exception as error:  # the compiler's own, of a type that it keeps to itself
            found: dict[str, Any] = {"error": str(error)}
        else:
            found = figures(compiled) | {"device": chips.devices[0].device_kind}
            (folder / f"{name}.txt").write_text(compiled.hlo_modules()[0].to_string())
        found["seconds"] = time.perf_counter() - began
        partial = folder / f"{name}.partial"
        partial.write_text(json.dumps(found))
        partial.rename(folder / f"{name}.json")


if __name__ == "__main__":
    work = json.loads(Path(sys.argv[2]).read_text())
    theirs = os.environ.get("LIBTPU_INIT_ARGS", "")
    os.environ |= NO_HOST | {"LIBTPU_INIT_ARGS": f"{_FLAGS} {work['flags']} {theirs}".strip()}
    main(Path(sys.argv[1]), work)
