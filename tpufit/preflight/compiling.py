"""Compiles programs for an absent TPU with libtpu, in a separate process: `python compiling.py FOLDER JOB`.

It imports neither PyTorch nor the rest of tpufit, because libtpu may crash the process, and needs memory and time. For
each program of the job it writes `NUMBER.SLICE.json`, and the optimized program as text.
"""

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Without these variables libtpu looks for this host's TPU: it asks the cloud's metadata server, and waits.
NO_HOST = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is used, so other processes may use them
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_PLATFORMS": "cpu",
}
# The flags with which torch_xla starts a TPU, see torch_xla/__init__.py.
FLAGS = (
    "--xla_tpu_use_enhanced_launch_barrier=false --xla_latency_hiding_scheduler_rerun=1 "
    "--xla_tpu_prefer_async_allgather_to_allreduce=true --xla_tpu_enable_flash_attention=false"
)
# By operation of a scan, the value that leaves the other operand as it is.
NEUTRAL = {"stablehlo.add": 0, "stablehlo.multiply": 1}


def import_hlo() -> Any:
    """Return JAX's module for HLO, which is a separate module in newer releases."""
    from jax._src.lib import xla_client

    try:
        from jaxlib import _hlo
    except ImportError:
        return xla_client._xla
    return _hlo


def is_stablehlo(program: bytes) -> bool:
    """True for a program as StableHLO text, from torch_tpu; False for XLA's proto, from torch_xla."""
    return program.startswith(b"module ")


def annotate(program: bytes, arguments: list[dict[str, Any]], cores: int) -> Any:
    """Return the program as MLIR, and annotate arguments with their sharding and donation.

    StableHLO from torch_tpu already has both.
    """
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    text = (
        program
        if is_stablehlo(program)
        else xla_client._xla.mlir.xla_computation_to_mlir_module(import_hlo().XlaComputation(program))
    )
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        rewrite_scans(module)
        main: Any
        (main,) = (op for op in module.body.operations if ir.StringAttr(op.attributes["sym_name"]).value == "main")
        shapes = [list(ir.RankedTensorType(argument.type).shape) for argument in main.arguments]
        if shapes != [argument["shape"] for argument in arguments]:
            raise SystemExit("the program's arguments differ from the traced arguments")
        attributes = []
        for argument in () if is_stablehlo(program) else arguments:
            attribute: dict[str, Any] = {"jax.buffer_donor": ir.BoolAttr.get(True)} if argument["donated"] else {}
            if cores > 1:
                attribute["mhlo.sharding"] = ir.StringAttr.get(make_sharding(argument, cores))
            attributes.append(ir.DictAttr.get(attribute))
        if attributes:
            main.arg_attrs = ir.ArrayAttr.get(attributes)
        # Newer releases of JAX compile the module itself.
        return module if import_hlo() is not xla_client._xla else mlir.module_to_bytecode(module)


def rewrite_scans(module: Any) -> None:
    """Replace the scans in an MLIR module whose body only adds or only multiplies. Other scans stay.

    TorchTPU traces `torch.cumsum` and `torch.cumprod` to `chlo.scan`, which has no portable form in JAX's releases so
    far. torch_xla, and JAX itself, trace them to `stablehlo.reduce_window`, with a window as long as the dimension; XLA
    recognizes this form.
    """
    for scan in list(_find_scans(module.operation)):
        name = _find_operation(scan)
        if name and _is_filled_with(scan.operands[1], NEUTRAL[name]):
            _replace(scan, name)


def _find_scans(operation: Any) -> Iterator[Any]:
    for inner in (inner for region in operation.regions for block in region for inner in block.operations):
        if inner.operation.name == "chlo.scan":
            yield inner.operation
        yield from _find_scans(inner.operation)


def _find_operation(scan: Any) -> str:
    """Return the name of the operation that combines each element with the sum so far; "" for another body."""
    (block,) = scan.regions[0].blocks
    combine, *others = block.operations
    only_sums = len(scan.operands) == 2 and not list(scan.results[1].uses)
    is_plain = len(others) == 1 and all(value == combine.results[0] for value in others[0].operands)
    is_plain = is_plain and all(any(one == other for other in combine.operands) for one in block.arguments)
    return str(combine.name) if only_sums and is_plain and combine.name in NEUTRAL else ""


def _is_filled_with(start: Any, number: int) -> bool:
    if start.owner.name != "stablehlo.constant":
        return False
    value = start.owner.attributes["value"]
    return bool(value.is_splat and value.get_splat_value().value == number)


def _replace(scan: Any, name: str) -> None:
    import numpy
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import hlo

    given = ir.RankedTensorType(scan.operands[0].type)
    dimension = ir.IntegerAttr(scan.attributes["dimension"]).value
    window = [1] * given.rank
    window[dimension] = given.shape[dimension]
    padding = [[0, 0] for _ in window]
    padding[dimension][ir.BoolAttr(scan.attributes["is_reverse"]).value] = window[dimension] - 1
    neutral = scan.operands[1].owner.attributes["value"].get_splat_value()
    with scan.location, ir.InsertionPoint(scan):
        number = ir.RankedTensorType.get([], given.element_type)
        start = hlo.constant(ir.DenseElementsAttr.get_splat(number, neutral))
        edges = ir.DenseElementsAttr.get(numpy.array(padding, numpy.int64))
        sums = hlo.ReduceWindowOp([given], [scan.operands[0]], [start], window, padding=edges)
        block = sums.regions[0].blocks.append(number, number, arg_locs=[scan.location] * 2)
        with ir.InsertionPoint(block):
            combined = ir.Operation.create(name, results=[number], operands=list(block.arguments))
            hlo.return_([combined.results[0]])
    scan.results[0].replace_all_uses_with(sums.results[0])
    scan.erase()


def build_hlo_module(program: bytes) -> Any:
    """Return a traced program as an object of JAX."""
    from jax._src.lib import xla_client

    if is_stablehlo(program):
        return xla_client._xla.mlir.mlir_module_to_xla_computation(program).get_hlo_module()
    return import_hlo().XlaComputation(program).get_hlo_module()


def as_text(module: Any) -> str:
    """Return the text of an HLO module, a line for each operation. Kernels may have metadata of several lines."""
    text: str = module.to_string()
    return text.replace("={\n", "={").replace(',\n"', ',"').replace("\n}}", "}}")


def make_sharding(argument: dict[str, Any], cores: int) -> str:
    """Return the sharding of an argument over the cores, in XLA's syntax."""
    axis = argument["axis"]
    shape = argument["shape"]
    if axis is None or axis >= len(shape):
        return "{replicated}"
    tiles = ",".join(str(cores if i == axis else 1) for i in range(len(shape)))
    return f"{{devices=[{tiles}]<=[{cores}]}}"


def compile_for(devices: list[Any], module: Any) -> Any:
    """Compile a program that runs on several devices together."""
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


def read_figures(program: Any) -> dict[str, Any]:
    """Return the compiler's figures for a program."""
    stats = program.get_compiled_memory_stats()
    cost = program.cost_analysis()
    names = ("argument", "output", "alias", "temp", "generated_code")
    return {
        "memory": {name: getattr(stats, f"{name}_size_in_bytes") for name in names},
        "flops": cost.get("flops", 0.0),
        "bytes": cost.get("bytes accessed", 0.0),
        "loops": estimate_loop_costs(as_text(program.hlo_modules()[0])),
    }


def estimate_loop_costs(text: str) -> dict[str, dict[str, float]]:
    """Return the figures of one iteration of each loop, by its body's name. The program's figures include them."""
    from jax._src.lib import xla_client

    costs: dict[str, dict[str, float]] = {}
    for body in re.findall(r" while\(.*body=%([^,\s]+)", text):
        # Build a program of the body and all computations before it, which are all that it may call.
        begin = text.index(f"\n%{body} (")
        end = text.index("\n}", begin) + 2
        alone = f"HloModule body\n{text[text.index(chr(10)) : begin]}\n\nENTRY {text[begin + 1 : end]}"
        module = import_hlo().hlo_module_from_text(alone)
        cost = xla_client._xla.hlo_module_cost_analysis(xla_client.make_cpu_client(), module)
        costs[body] = {"flops": cost.get("flops", 0.0), "bytes": cost.get("bytes accessed", 0.0)}
    return costs


def main(folder: Path, job: dict[str, Any]) -> None:
    """Compile the programs of a job in turn, and write the compiler's figures or error for each."""
    from jax.experimental import topologies

    chips: Any = topologies.get_topology_desc(
        platform="tpu",
        topology_name=job["topology"],
        chips_per_host_bounds=tuple(job["chips_per_host_bounds"]),
        chip_config_name=job["config"],
    )
    for number, program in job["programs"].items():
        if not (folder / f"{number}.before.txt").exists():
            (folder / f"{number}.before.txt").write_text(
                as_text(build_hlo_module((folder / f"{number}.hlo").read_bytes()))
            )
        name = f"{number}.{job['slice']}"
        module = annotate((folder / f"{number}.hlo").read_bytes(), program["arguments"], job["cores"])
        began = time.perf_counter()
        try:
            compiled = compile_for(chips.devices[: job["cores"]], module)
        except Exception as error:  # the compiler's errors have private types
            result: dict[str, Any] = {"error": str(error)}
        else:
            result = read_figures(compiled)
            (folder / f"{name}.txt").write_text(as_text(compiled.hlo_modules()[0]))
        result["seconds"] = time.perf_counter() - began
        (folder / f"{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    arguments = json.loads(Path(sys.argv[2]).read_text())
    users_flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    os.environ.pop("TPU_LIBRARY_PATH", None)  # it may name another plugin, on which the user trains without a TPU
    os.environ |= NO_HOST | {"LIBTPU_INIT_ARGS": f"{arguments['flags']} {users_flags}".strip()}
    main(Path(sys.argv[1]), arguments)
