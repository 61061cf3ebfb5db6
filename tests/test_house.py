"""Rules of the code: no object uses another's private attributes, and the user's objects belong to the user."""

import ast
import re

import pytest
from test_floors import ROOT, SOURCES

# Names that begin with an underscore and belong to other libraries, with the objects that have them.
# Each is the only way that PyTorch, torch_xla, torchmetrics or Python offers.
FRIENDS = {
    "runtime._XLAC": "torch_xla's own bindings, in tpufit/drivers/xla/ only",
    "xla()": "the same",
    "torch._C": "PyTorch's dispatcher",
}
FRIENDLY_ATTRIBUTES = {
    "_buffers": "of an nn.Module: which buffers there are, also those that were replaced",
    "_parameters": "of an nn.Module: the same of its parameters",
    "_cdata": "of a storage: its identity, whether it has been computed or not",
    "_is_functional_tensor": "of torch: whether a tensor is one of a device that traces",
    "_is_functional_tensor_base": "of torch: whether such a tensor isn't a view",
    "_functionalize_apply_view_metas": "of torch 2.8: the same view of another tensor",
    "_functionalize_is_multi_output_view": "of torch: whether a tensor is one of several views, as of unbind",
    "_is_view": "of a tensor: whether its memory is another's",
    "_base": "of a tensor: the one whose memory it has",
    "_view_func_unsafe": "of a tensor: the same view of another one",
    "_fix_weakref": "of a tensor: lets Python own a tensor that only C++ has kept",
    "_use_count": "of a tensor: the number of its users in C++; 0 while it is being freed",
    "_backward_hooks": "of a tensor: what is told of its gradient",
    "_version": "of a tensor: how often it was changed in place",
    "_make_subclass": "of torch.Tensor: a parameter over another's value",
    "_defaults": "of a torchmetrics metric: its sums as they begin",
    "_update_count": "of a torchmetrics metric: else it warns that nothing was added",
    "_next_data": "of a DataLoader's iterator: `next` takes 20 microseconds more, to mark the call for a profiler",
    "_exit": "of os: the end of a process whose main thread can't come to it",
    "_getframe": "of sys: the caller's line",
    "_current_frames": "of sys: the line of the main thread",
    "_prepare_to_exit": "of torch_xla: what it does at the end of a process",
    "_task_info": "of a DataLoader's iterator: the worker that has a batch",
    "_rcvd_idx": "of a DataLoader's iterator: the batch that comes next",
    "_is_compiling_flag": "of torch.compiler: as torch.export sets it",
    "_engine": "of a model: `load` fills it, in model.py",
    "_XLAC": "of torch_xla: its bindings",
    "_C": "of torch: its bindings",
    "_schema": "of torch's operations: their arguments",
    "_ops": "of torch: the type of an operation's forms",
    "_xla": "of jaxlib's xla_client: its bindings, in the process that compiles for a TPU",
}


def attributes_of(kind):
    """The attributes that objects of a class have: those set on self, and the fields of a dataclass or named tuple."""
    names = {
        target.attr
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        for target in [node]
        if isinstance(target.value, ast.Name) and target.value.id == "self"
    }
    is_record = any("dataclass" in ast.unparse(decorator) for decorator in kind.decorator_list)
    is_record |= any(ast.unparse(base) == "NamedTuple" for base in kind.bases)
    if is_record:
        names |= {node.target.id for node in kind.body if isinstance(node, ast.AnnAssign)}
    return names


def classes():
    for module, (path, tree) in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield module, path, node


def reaches():
    """Yield each private attribute of another object in the code: its place, the object, and the attribute."""
    for path, tree in SOURCES.values():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
                continue
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls"):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", owner, node.attr


def test_no_object_uses_private_attributes_of_another():
    reached = [
        f"{place} {owner}.{name}"
        for place, owner, name in reaches()
        if owner not in FRIENDS and name not in FRIENDLY_ATTRIBUTES
    ]
    assert not reached, "\n".join(reached)


def test_every_exception_is_needed():
    owners = {owner for _, owner, _ in reaches()}
    names = {name for _, owner, name in reaches() if owner not in FRIENDS}
    assert (FRIENDS.keys() - owners, FRIENDLY_ATTRIBUTES.keys() - names) == (set(), set())


@pytest.mark.parametrize("name", ["Model", "StepMethods"])
def test_the_users_object_has_one_private_name(name):
    kind = next(kind for _, _, kind in classes() if kind.name == name)
    private = {
        node.name
        for node in kind.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_") and not node.name.startswith("__")
    }
    assert not private and {n for n in attributes_of(kind) if n.startswith("_")} <= {"_engine"}


def test_every_warning_names_the_users_line():
    own = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in SOURCES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("warnings.warn", "logging.warning"))
    ]
    assert {place.partition(":")[0] for place in own} == {"tpufit/utils/user_code.py"}, own


# Calls that change the process outside of the code that makes them.
CHANGE_THE_PROCESS = {
    "atexit.register",
    "atexit.unregister",
    "copyreg.pickle",
    "gc.disable",
    "gc.freeze",
    "library.impl",
    "logging.disable",
    "environ.pop",
    "environ.setdefault",
    "os.environ.pop",
    "os.register_at_fork",
    "os.environ.setdefault",
    "signal.signal",
    "sys.meta_path.insert",
    "sys.setprofile",
    "torch.set_num_threads",
}


def root_of(node):
    """Return the first name in an expression such as `a.b[c].d`."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def changes_the_process(node, others):
    """True for a statement or call that sets an attribute of another library, or an object's class."""
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        gives = called in ("setattr", "replacing_attributes") and bool(node.args) and root_of(node.args[0]) in others
        return called in CHANGE_THE_PROCESS or gives
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    return any(
        isinstance(target, (ast.Attribute, ast.Subscript))
        and (root_of(target) in others or (isinstance(target, ast.Attribute) and target.attr == "__class__"))
        for target in targets
    )


def test_every_change_of_the_process_is_listed():
    changing = set()
    for path, tree in SOURCES.values():
        imports = [
            n for n in ast.walk(tree) if isinstance(n, ast.Import) or (isinstance(n, ast.ImportFrom) and not n.level)
        ]
        others = {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}
        if any(changes_the_process(node, others) for node in ast.walk(tree)):
            changing.add(path.relative_to(ROOT).as_posix().removeprefix("tpufit/"))
    listed = re.findall(
        r"^\| `([a-z_/]+\.py)` \|", (ROOT / "tpufit/utils/process_changes.py").read_text(), re.MULTILINE
    )
    assert changing == set(listed)


def test_names_of_tests_are_short_enough_to_search_for():
    tests = re.compile(r"^ *def (test_\w+)", re.MULTILINE)
    names = [name for path in sorted((ROOT / "tests").rglob("test_*.py")) for name in tests.findall(path.read_text())]
    assert len(names) > 1000 and [name for name in names if len(name) > 70] == []


def test_the_table_of_a_package_lists_its_modules():
    listed = {}
    for package in sorted((ROOT / "tpufit").rglob("__init__.py")):
        rows = re.findall(r"^\| (`[^|]+) \|", package.read_text(), flags=re.MULTILINE)
        if rows:
            modules = {path.stem for path in package.parent.glob("*.py")} - {"__init__"}
            packages = {path.parent.name for path in package.parent.glob("*/__init__.py")}
            listed[package.parent.name] = (set(re.findall(r"`(\w+)`", " ".join(rows))), modules | packages)
    assert len(listed) > 5
    assert {name: found for name, (found, _) in listed.items()} == {name: there for name, (_, there) in listed.items()}


def test_attributes_that_docstrings_cite_exist():
    """`Class.attribute` in a docstring or a comment, where the class is ours."""
    ours = {}
    known = {}
    for _, _, kind in classes():
        ours.setdefault(kind.name, []).append(kind)
        known[kind.name] = known.get(kind.name, set()) | attributes_of(kind) | defined_in(kind)

    def has(name, attribute):
        bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for kind in ours[name] for base in kind.bases]
        foreign = any(base not in ours and base not in ("ABC", "Generic", "Protocol") for base in bases)
        return attribute in known[name] or foreign or any(has(base, attribute) for base in bases if base in ours)

    cited = [
        (path.relative_to(ROOT).as_posix(), *name.split("."))
        for path, _ in SOURCES.values()
        for name in re.findall(r"`([A-Z]\w+\.\w+)(?:\(.*?\))?`", path.read_text())
    ]
    cited = [(place, name, attribute) for place, name, attribute in cited if name in ours]
    assert len(cited) > 50 and [one for one in cited if not has(*one[1:])] == []


def defined_in(kind):
    """The methods, fields and class variables of a class."""
    targets = [
        node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        for node in kind.body
        if isinstance(node, (ast.AnnAssign, ast.Assign))
    ]
    return {node.name for node in kind.body if isinstance(node, ast.FunctionDef)} | {
        target.id for target in targets if isinstance(target, ast.Name)
    }
