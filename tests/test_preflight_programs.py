"""Small real trainings compiled for TPUs: state is updated in place, and cores exchange only sums."""

import json
import math
import re
from collections import Counter

import numpy as np
import pytest
import torch
from engines import engine_of
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

import tpufit
from tpufit.data.user_data import recognize
from tpufit.preflight.analysis import analyze
from tpufit.preflight.children import run
from tpufit.preflight.hlo import find_products, parse_operations
from tpufit.preflight.pickling import pickle_training
from tpufit.preflight.preflight_plan import ENVIRON, PLAN, TRACED
from tpufit.preflight.run_preflight import PreflightRun
from tpufit.preflight.tpu_slices import find_slice
from tpufit.trainer.fit_arguments import TrainingData, ValidationData

pytestmark = pytest.mark.slow

SLICES = (pytest.param("v3-8", marks=pytest.mark.soak), "v5e-8")  # both have 8 cores
CLASSES, WORDS, LENGTH, WIDTH = 10, 64, 32, 64


def mlp():
    return nn.Sequential(
        nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.ReLU(),
        nn.Linear(128, CLASSES),
    )  # fmt: skip


def convnet():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES),
    )  # fmt: skip


class Transformer(nn.Module):
    """One block over words, each of which attends to the previous words."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        x = self.words(x) + self.positions
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return self.head(x + self.feed_forward(self.norm2(x)))


def of_words(logits, words):
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


ROWS = 8 * 16 + 11  # a whole batch of 16 rows per core, and a batch that 8 cores can't divide evenly
WHOLE, LAST = 128, 11
LABELS = np.zeros(ROWS, np.int64)
TEXT = np.zeros((ROWS, LENGTH), np.int64)
VECTORS, IMAGES = np.zeros((ROWS, 32), np.float32), np.zeros((ROWS, 3, 16, 16), np.float32)
# The net, x, y, the loss, the metric and the precision.
TRAININGS = {
    "mlp": (mlp, VECTORS, LABELS, "cross_entropy", "accuracy", "bf16"),
    "mlp in float32": (mlp, VECTORS, LABELS, "cross_entropy", "accuracy", "fp32"),
    "convnet": (convnet, IMAGES, LABELS, "cross_entropy", "accuracy", "fp32"),
    "transformer": (Transformer, TEXT, TEXT, of_words, "accuracy", "bf16"),
}
# A torchmetrics object gets the rows of all cores, because its computation is unknown.
GATHERING = {"gathering": (mlp, VECTORS, LABELS, "cross_entropy", MulticlassAccuracy(CLASSES), "fp32")}
every_slice = pytest.mark.parametrize("on", SLICES, indirect=True, scope="module")
every_training = pytest.mark.parametrize("name", TRAININGS)


@pytest.fixture(scope="module")
def on(request):
    """The slice for which programs are compiled."""
    return request.param


@pytest.fixture(scope="module")
def programs(tmp_path_factory, on):
    """By training, slice, role and rows: the facts of a program, its text as traced, and the compiled program."""
    folder = tmp_path_factory.mktemp("programs")
    trainings = TRAININGS | GATHERING
    for name, (make, x, y, loss, metric, precision) in trainings.items():
        net = make()
        model = tpufit.Model(net)
        model.compile(torch.optim.AdamW(net.parameters()), loss, metrics=[metric], precision=precision)
        data, held = TrainingData(recognize(x, y), batch_size=16), ValidationData(data=recognize(x, y))
        preflight_run = PreflightRun(engine_of(model), data, held, limit=None, timeout=600, verbose=False)
        state, _ = engine_of(model).state.tensors()
        (folder / name).mkdir()
        (folder / name / PLAN).write_bytes(pickle_training(preflight_run.plan(find_slice(on)), model, state.keys()))
    # One process for all of them, without the XLA flags of other tests.
    folders = [str(folder / name) for name in trainings]
    run(["-m", "tpufit.preflight.tracing", *folders], "tracing", 600, False, ENVIRON | {"XLA_FLAGS": ""})
    traced = {
        f"{name}/{number}": (name, facts)
        for name in trainings
        for number, facts in json.loads((folder / name / TRACED).read_text()).items()
    }
    compiled = preflight_run.compile({place: facts for place, (_, facts) in traced.items()}, folder, find_slice(on))
    found = {}
    for (place, (name, facts)), program in zip(traced.items(), compiled, strict=True):
        before = (folder / f"{place}.before.txt").read_text()
        found[name, on, program.role, program.rows] = facts, before, program
    return found


def of(programs, name, on):
    """Return the programs of a training on a slice."""
    return [found for key, found in programs.items() if key[:2] == (name, on)]


def between_cores(program):
    """Count the operations of each kind of communication in a program."""
    counts = Counter()
    for one in program.collectives:
        counts[one.kind] += one.count
    return dict(counts)


@every_training
@every_slice
def test_a_training_has_a_program_for_each_size_of_batch(programs, name, on):
    made = [(program.role, program.rows) for _, _, program in of(programs, name, on)]
    assert made == [("train", WHOLE), ("train", LAST), ("eval", WHOLE), ("eval", LAST)]


@every_training
@every_slice
def test_replaced_state_is_updated_in_place(programs, name, on):
    for facts, _, program in of(programs, name, on):
        state = {i for i, one in enumerate(facts["arguments"]) if one["source"] == "state"}
        head = program.text.partition("\n")[0]
        pairs = head.partition("input_output_alias={ ")[2].partition(" }, entry_computation_layout")[0]
        written_over = [int(number) for number in re.findall(r"\{\d*\}: \((\d+), \{\}", pairs)]
        # Training replaces all its state, and validation none.
        assert len(state) > 8 and sorted(written_over) == sorted(state if program.role == "train" else ())


# The sums between cores in a training step: of gradients, of each batch norm's statistics (forward and backward), of
# the loss and of the accuracy's counts. Everything else stays with the rows.
ALL_REDUCES = {"mlp": (4, 4), "mlp in float32": (5, 5), "convnet": (5, 5), "transformer": (3, 3)}
# Where (rows, words) becomes (rows * words,) or back, as in an embedding, the partitioner divides it only if the rows
# divide evenly. So the last batch of an epoch is gathered there, in training and in validation.
GATHERED_AT_LAST = {"transformer": (3, 2)}


@every_training
@every_slice
def test_cores_exchange_only_sums(programs, name, on):
    whole, last = ({"all-reduce": count} for count in ALL_REDUCES[name])
    evaluated = {"all-reduce": 2}, {"all-reduce": 2}  # the loss, and the accuracy
    for part, count in zip((last, evaluated[1]), GATHERED_AT_LAST.get(name, ()), strict=False):
        part["all-gather"] = count
    expected = {("train", WHOLE): whole, ("train", LAST): last}
    expected |= {("eval", WHOLE): evaluated[0], ("eval", LAST): evaluated[1]}
    assert {key[2:]: between_cores(found[2]) for key, found in programs.items() if key[:2] == (name, on)} == expected


@every_training
@every_slice
def test_no_sum_gathers_rows(programs, name, on):
    """The compiler may also gather by sums, in which each core's rows are added to zeros."""
    for _, _, program in of(programs, name, on):
        made = {o.name: o for o, _ in parse_operations(program.text)}
        operands = re.findall(r" all-reduce(?:-start)?\(([^)]*)\)", program.text)
        added = [made[word.split("%")[-1]] for words in operands for word in words.split(", ")]
        assert len(added) >= 2 and not [o for o in added if "dynamic-update-slice" in o.name]
    _, _, evaluated = programs[name, on, "eval", WHOLE]
    # The weighted sums of the loss and of the accuracy, with their weights, for any number of rows.
    assert sum(one.nbytes for one in evaluated.collectives) <= 16


@every_training
@every_slice
def test_each_core_draws_for_its_own_rows(programs, name, on):
    """A core derives its mask from the step's seed and the index: no number is drawn for all cores."""
    for _, _, program in of(programs, name, on):
        made = [operation for operation, _ in parse_operations(program.text)]
        mixes = bool(re.search(rf"u32\[\]\S* constant\({0x7FEB352D}\)", program.text))  # as its bits are
        assert mixes == (program.role == "train" and name != "convnet")
        assert "rng-bit-generator" not in {operation.kind for operation in made}
        assert (WHOLE, LENGTH, WIDTH) not in {array.shape for one in made for array in one.arrays}


@every_training
@every_slice
def test_programs_contain_no_float64(programs, name, on):
    for _, before, program in of(programs, name, on):
        found = [array for text in (before, program.text) for o, _ in parse_operations(text) for array in o.arrays]
        assert len(found) > 100
        assert not {str(array) for array in found if array.dtype in ("f64", "c128")}


@every_training
@every_slice
def test_only_64_bit_inputs_stay_in_64_bits(programs, name, on):
    labels = "s64[16]" if name != "transformer" else f"s64[16,{LENGTH}]"
    for role in ("train", "eval"):
        _, _, program = programs[name, on, role, WHOLE]
        arrays = [(o.kind, a) for o, _ in parse_operations(program.text) for a in o.arrays if a.dtype in ("s64", "u64")]
        larger = {(kind, str(array)) for kind, array in arrays if array.nbytes > 8}
        assert larger == {("parameter", labels)}


@every_training
@every_slice
def test_64_bit_labels_give_no_warning(programs, name, on):
    for role in ("train", "eval"):
        _, _, program = programs[name, on, role, WHOLE]
        assert "loss and metrics" not in program.warnings.get("64-bit", "")


@pytest.mark.soak
@every_training
@every_slice
def test_the_check_for_finite_logs_is_not_optimized_away(programs, name, on):
    """x - x is NaN if x isn't finite, and a compiler must not replace it by 0."""
    _, _, program = programs[name, on, "train", WHOLE]
    assert re.search(r"f32\[\]\S* subtract\((?:f32\[\]\S* )?(%\S+), (?:f32\[\]\S* )?\1\)", program.text)


@pytest.mark.soak
def test_weights_of_convolutions_have_the_layout_of_their_use():
    net = nn.Sequential(
        nn.Conv2d(3, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 256, 3, padding=1), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(256, CLASSES),
    )  # fmt: skip
    model = tpufit.Model(net)
    model.compile("adamw", "cross_entropy", precision="bf16")
    x, y = torch.zeros(128, 3, 16, 16), torch.zeros(128, dtype=torch.long)
    program = model.preflight(x, y, 16, tpu="v5e-8", verbose=0).step
    shapes = (3, 3, 256, 256), (256, 256, 3, 3)
    kinds = Counter(o.kind for o, _ in parse_operations(program.text) for a in o.arrays if a.shape in shapes)
    assert kinds["parameter"] >= 3  # the weight, and both states of its optimizer
    assert not kinds["copy"] and not kinds["transpose"], kinds


class Grouped(nn.Module):
    """Cross-attention of 8 heads with 2 heads of keys, twice, with padded sentences."""

    def __init__(self):
        super().__init__()
        self.queries = nn.ModuleList(nn.Linear(64, 8 * 16) for _ in range(2))
        self.keys, self.values = (nn.ModuleList(nn.Linear(64, 2 * 16) for _ in range(2)) for _ in range(2))

    def forward(self, x, others):
        mask = (torch.arange(128, device=x.device)[:, None] >= torch.arange(160, device=x.device) - 32) & (
            others[:, :, 0] != 0
        )[:, None, None]
        for layers in zip(self.queries, self.keys, self.values, strict=True):
            given = (x, others, others)
            q, k, v = (layer(y).unflatten(2, (-1, 16)).transpose(1, 2) for layer, y in zip(layers, given, strict=True))
            y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
            x = x + y.transpose(1, 2).flatten(2)[..., :64]
        return x


@pytest.mark.soak
def test_queries_share_keys_and_blocks_share_a_mask():
    """The compiled program keeps no repeated keys or values, no mask per head, and one mask for all blocks."""
    model = tpufit.Model(Grouped())
    model.compile("adamw", "mse", precision="bf16")
    x, others = torch.zeros(32, 128, 64), torch.zeros(32, 160, 64)
    program = model.preflight((x, others), x, 4, tpu="v5e-8", verbose=0).step
    kept = [a for o, own in parse_operations(program.text) if own for a in o.arrays if o.kind != "get-tuple-element"]
    scores, repeated, of_each_row = 4 * 8 * 128 * 160, 4 * 8 * 160 * 16, 4 * 128 * 160
    sizes = Counter((a.dtype, np.prod(a.shape, dtype=int)) for a in kept)
    assert sizes["f32", scores] or sizes["bf16", scores]
    assert not sizes["bf16", repeated] and not sizes["f32", repeated]
    assert not [key for key in sizes if key[0] in ("pred", "u8", "s8") and key[1] >= scores]
    assert sum(sizes[dtype, of_each_row] for dtype in ("pred", "u8", "s8")) <= 1


class Dropping(nn.Module):
    """Attention over 256 words that drops weights."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 3 * 64)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        return y.transpose(1, 2).flatten(2)


@pytest.mark.soak
@pytest.mark.parametrize("rows", [4, 160])
def test_no_mask_of_dropped_attention_is_stored(rows):
    """Nor do 160 rows, which are too large for a core's fast memory, keep the gradient of scores in float32."""
    model = tpufit.Model(Dropping())
    model.compile("adamw", "mse", precision="bf16")
    x = torch.zeros(8 * rows, 256, 64)
    program = model.preflight(x, x, rows, tpu="v5e-8", verbose=0).step
    kept = {a.dtype for o, own in parse_operations(program.text) if own for a in o.arrays if _is_of_scores(a, rows)}
    assert kept == ({"bf16", "f32"} if rows == 4 else {"bf16"})


def _is_of_scores(array, rows):
    return math.prod(array.shape) == rows * 4 * 256 * 256


class Masked(nn.Module):
    """Two causal blocks that share a mask with padding, or have no mask."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        widths = (256, 3 * 256), (256, 256), (256, 1024), (1024, 256)
        self.qkv, self.out, self.up, self.down = (nn.ModuleList(nn.Linear(*w) for _ in range(2)) for w in widths)

    def forward(self, x, filled):
        mask = None
        if self.form != "causal":
            places = torch.arange(x.shape[1], device=x.device)
            mask = (places[:, None] >= places) & filled[:, None, None]
        if self.form == "additive":
            mask = torch.zeros(mask.shape, device=x.device).masked_fill(~mask, -torch.inf)
        for qkv, out, up, down in zip(self.qkv, self.out, self.up, self.down, strict=True):
            q, k, v = qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
            x = x + out(y.transpose(1, 2).flatten(2))
            x = x + down(F.gelu(up(x)))
        return x


@pytest.mark.soak
def test_attention_masks_cost_little():
    costs = {}
    for form in ("causal", "boolean", "additive"):
        model = tpufit.Model(Masked(form))
        model.compile("adamw", "mse", precision="bf16")
        x, filled = torch.zeros(32, 256, 256), torch.ones(32, 256, dtype=torch.bool)
        costs[form] = model.preflight((x, filled), x, 4, tpu="v5e-8", verbose=0).step.cost
    for form in ("boolean", "additive"):
        assert costs[form].cycles <= 1.05 * costs["causal"].cycles, costs
        assert costs[form].nbytes <= 1.05 * costs["causal"].nbytes, costs


@every_training
@every_slice
def test_matrix_products_have_the_requested_precision(programs, name, on):
    expected = "bf16" if TRAININGS[name][-1] == "bf16" else "f32"
    for _, before, program in of(programs, name, on):
        products = [multiplied for _, multiplied in find_products(o for o, _ in parse_operations(before))]
        assert len(products) >= 3 and set(products) == {expected}
        assert "float32" not in program.warnings


@every_slice
def test_rows_gathered_by_sums_are_reported(programs, on):
    for _, _, program in of(programs, "gathering", on):
        assert between_cores(program)["all-gather by sums"] >= 1
        said = program.warnings["gathers"]
        assert said.startswith("rows travel between cores, ") and "all-gather by sums" in said


@pytest.mark.soak
def test_recomputed_blocks_need_less_memory(run_python):
    code = """
        import torch
        from torch import nn
        from torch.utils.checkpoint import checkpoint
        import tpufit

        class Checkpointed(nn.Module):
            def __init__(self, net):
                super().__init__()
                self.net = net

            def forward(self, x):
                for layer in self.net.layers:
                    x = checkpoint(layer, x, use_reentrant=False)
                return x

        temporaries, cycles = {}, {}
        for remat in (None, True, "by the module"):
            layer = nn.TransformerEncoderLayer(128, 2, 512, dropout=0.0, batch_first=True)
            net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            own = remat == "by the module"
            model = tpufit.Model(Checkpointed(net) if own else net)
            model.compile("adamw", "mse", precision="bf16", remat=None if own else remat)
            x = torch.zeros(64, 256, 128)
            step = model.preflight(x, x, tpu="v5e-1", batch_size=64, verbose=0).step
            temporaries[remat], cycles[remat] = step.memory.parts["temporaries"], step.cost.cycles
        print(temporaries, cycles)
        for again in (True, "by the module"):
            assert temporaries[again] < 0.7 * temporaries[None]
            assert cycles[None] < cycles[again] < 1.7 * cycles[None]
        """
    ended = run_python(code, timeout=900)
    assert ended.returncode == 0, ended.stderr


LOOPS = """
    import json, os
    from pathlib import Path
    from tpufit.preflight.compiling import NO_HOST, annotate, as_text, build_hlo_module, compile_for, read_figures

    os.environ |= NO_HOST
    import jax
    from jax import lax, numpy as jnp
    from jax.experimental import topologies

    def once(x, w):
        return jnp.tanh(x @ w)

    def apart(x, ws, stop):
        for _ in range(3):
            for w in ws:
                x = once(x, w)
        return x

    def looped(x, ws, stop):  # one loop inside of another
        return lax.fori_loop(0, 3, lambda _, x: lax.scan(lambda x, w: (once(x, w), None), x, ws)[0], x)

    def endless(x, ws, stop):  # until a value is reached
        return lax.while_loop(lambda x: x.sum() > stop, lambda x: once(x, ws[0]), x)

    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=(1, 1, 1))
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 256), (5, 256, 256), ())]
    for function in (apart, looped, endless):
        hlo = jax.jit(function, keep_unused=True).lower(*given).compiler_ir("hlo").as_serialized_hlo_module_proto()
        arguments = [{"shape": list(one.shape), "donated": False, "axis": None} for one in given]
        program = compile_for(chips.devices[:1], annotate(hlo, arguments, 1))
        found = read_figures(program) | {"seconds": 1.0, "text": program.hlo_modules()[0].to_string()}
        Path(f"{function.__name__}.json").write_text(json.dumps(found))
    """


def test_a_loops_body_counts_for_each_iteration(run_python, tmp_path):
    ended = run_python(LOOPS, timeout=300)
    assert ended.returncode == 0, ended.stderr
    arguments = [{"source": "state", "name": ""}] * 3
    facts = {"role": "train", "cause": "", "rows": 512, "steps": 1, "lines": [], "precision": "fp32"}
    costs, within = {}, {}
    for name in ("apart", "looped", "endless"):
        found = json.loads((tmp_path / f"{name}.json").read_text())
        program = analyze(facts | {"arguments": arguments}, found, "", found["text"], find_slice("v5e-1"))
        assert (" while(" in program.text) == (name != "apart")
        costs[name] = program.cost
        within[name] = max((one.cycles for one, entry in parse_operations(program.text) if not entry), default=0)
    product = 2 * 512 * 256 * 256
    apart, looped, endless = costs.values()
    assert apart.flops == pytest.approx(15 * product, rel=0.01) and looped.flops == pytest.approx(apart.flops, rel=0.01)
    assert apart.loops == looped.loops == 0 and endless.loops == 1
    assert looped.cycles >= 15 * within["looped"] > 0 and looped.nbytes > 15 * 256 * 256 * 4
    assert endless.flops == pytest.approx(product, rel=0.01)


STABLEHLO = """
    import json, os
    from tpufit.preflight.compiling import NO_HOST, annotate, as_text, build_hlo_module, compile_for, read_figures

    os.environ |= NO_HOST
    from jax.experimental import topologies

    whole, rows = 'mhlo.sharding = "{replicated}"', 'mhlo.sharding = "{devices=[8,1]<=[8]}"'
    kind, given = "tensor<256x256xf32>", "tensor<512x256xf32>"
    lines = [
        "module @step attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {",
        f"func.func @main(%arg0: {kind} {{{whole}, tf.aliasing_output = 0 : i32}}, %arg1: {given} {{{rows}}})",
        f"-> ({kind} {{{whole}}}) {{",
        f"%0 = stablehlo.dot_general %arg1, %arg1, contracting_dims = [0] x [0] : ({given}, {given}) -> {kind}",
        f"%1 = stablehlo.add %arg0, %0 : {kind}",
        f"return %1 : {kind} }} }}",
    ]
    program = os.linesep.join(lines).encode()
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4", chips_per_host_bounds=(2, 4, 1))
    arguments = [{"shape": shape, "donated": False, "axis": None} for shape in ([256, 256], [512, 256])]
    compiled = compile_for(chips.devices[:8], annotate(program, arguments, 8))
    before, after = as_text(build_hlo_module(program)), as_text(compiled.hlo_modules()[0])
    found = read_figures(compiled)["memory"], "all-reduce" in after, before
    print(json.dumps(found))
    """


def test_stablehlo_has_sharding_and_donation(run_python):
    """As torch_tpu returns it."""
    ended = run_python(STABLEHLO, timeout=300)
    assert ended.returncode == 0, ended.stderr
    memory, sums, before = json.loads(ended.stdout)
    assert memory["alias"] == memory["output"] == 256 * 256 * 4
    assert memory["argument"] == 256 * 256 * 4 + 64 * 256 * 4
    assert sums and "HloModule" in before
