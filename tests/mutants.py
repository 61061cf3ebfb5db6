"""Finds random mutants of the library that no test notices. Run it by hand on idle cores; it takes an hour or two:

    python tests/mutants.py [--count 200] [--seed 0] [--seconds 60] [--soak] [--out FILE]

A mutant is one small change of the code: a different comparison, a number plus one, a negated condition, a removed
call. All mutants are inserted into one copy of the checkout, each behind a switch, an environment variable:

    1. the quick tests run once without switches, and record the mutants that each test reaches, and its seconds
    2. for each mutant its tests run with its switch on, the quickest first, until one fails: the mutant is killed. It
       survives if none fails within `--seconds` of the tests' own time

A surviving mutant is a gap in the tests, or an equivalent program. With `--soak` the soak tests run on survivors too:
they find what the quick tests miss. `--out` records each mutant's place, its change, the number of tests that reach it,
and the test that killed it.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import processes

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("step", "data", "checkpoint", "trainer")
SWITCH = '''
import os

_process, _on, _seen = None, -1, set()


def on(number):
    """True if a mutant is on; otherwise the test that came by is noted."""
    global _process, _on
    if _process != os.getpid():  # a forked process has an environment of its own
        _process, _on = os.getpid(), int(os.environ.get("MUTANT", -1))
    notes = os.environ.get("MUTANTS_SEEN") if _on < 0 else None
    if notes:
        test, _, phase = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")
        # A fixture may be that of all tests of the file.
        line = f"{number} {test.partition('::')[0] if phase == '(setup)' else test}\\n"
        if line not in _seen:
            _seen.add(line)
            with open(notes, "a") as file:
                file.write(line)
    return number == _on
'''
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SUMS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip
WORDS = (ast.JoinedStr, ast.Constant)


@dataclass
class Mutant:
    """A change of the code.

    Attributes:
        number: Its switch.
        place: The file and line.
        change: The code before and after.
        tests: The number of tests that reach it.
        killer: The test that failed, or another reason why the run ended; empty if the mutant survived.
        soak: The number of soak tests that reach it.
        soak_killer: As `killer`, for soak tests, which run on mutants that survived the quick tests.
    """

    number: int
    place: str
    change: str
    tests: int = 0
    killer: str = ""
    soak: int = 0
    soak_killer: str = ""


def changed(node: ast.AST) -> ast.expr | None:
    """Return the mutation of an expression; None if there is none."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.BinOp) and type(node.op) in SUMS:
        texts = [side for side in (node.left, node.right) if isinstance(side, WORDS) and not _is_number(side)]
        return None if texts else ast.BinOp(node.left, SUMS[type(node.op)](), node.right)
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return ast.Constant(not node.value)
    if isinstance(node, ast.Constant) and _is_number(node):
        return ast.Constant(node.value + 1)  # type: ignore[operator]
    return None


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def is_left_out(node: ast.AST) -> bool:
    """True if a statement can be removed: a call whose value is unused, a raise, or an augmented assignment."""
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return called or isinstance(node, (ast.Raise, ast.AugAssign, ast.Break, ast.Continue))


class Sites(ast.NodeTransformer):
    """Visits the mutable places inside functions, and replaces them by the results of `make`."""

    def __init__(self, make: Callable[[ast.AST, str], ast.AST]) -> None:
        self.make = make
        self.inside = False  # of a function

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outside, self.inside = self.inside, True
        node.body = [self.visit(statement) for statement in node.body]  # neither decorators nor defaults
        self.inside = outside
        return node

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, (ast.Assert, ast.AnnAssign, ast.JoinedStr, ast.match_case)):
            return node
        if isinstance(node, ast.Raise):  # removed as a whole, or unchanged; its message isn't mutated
            return self.make(node, _shown(node, None))
        if not self.inside:
            return super().visit(node)
        other = changed(node)
        change = _shown(node, other) if other is not None or is_left_out(node) else ""
        node = super().visit(node)
        return self.make(node, change) if change else node


def _shown(before: ast.AST, after: ast.AST | None) -> str:
    return f"{ast.unparse(before)[:100]} -> {ast.unparse(after)[:100] if after else 'left out'}"


def mutants(folder: Path, count: int, seed: int) -> list[Mutant]:
    """Insert mutants into a copy of the checkout, at random places."""
    paths = sorted(path for name in FOLDERS for path in (folder / "tpufit" / name).rglob("*.py"))
    places: list[tuple[Path, int]] = []
    for path in paths:
        sites = _Counted()
        sites.visit(ast.parse(path.read_text()))
        places += [(path, i) for i in range(sites.count)]
    drawn = sorted(random.Random(seed).sample(places, min(count, len(places))))
    found: list[Mutant] = []
    by_path = defaultdict(set)
    for path, i in drawn:
        by_path[path].add(i)
    for path, numbers in by_path.items():
        sites = _Counted(numbers, found, str(path.relative_to(folder)))
        tree = sites.visit(ast.parse(path.read_text()))
        future = [line for line in tree.body if isinstance(line, ast.ImportFrom) and line.module == "__future__"]
        own = ast.parse("from tpufit_mutants import on as _mutant_is_on").body
        at = tree.body.index(future[-1]) + 1 if future else 1
        tree.body[at:at] = own
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)) + "\n")
    (folder / "tpufit_mutants.py").write_text(SWITCH)
    return found


class _Counted(Sites):
    """Counts the places of a file, and inserts a switch at places with certain numbers."""

    def __init__(self, numbers: set[int] | None = None, found: list[Mutant] | None = None, path: str = "") -> None:
        super().__init__(self.switched)
        self.numbers, self.found, self.path = numbers or set(), found if found is not None else [], path
        self.count = 0

    def switched(self, node: ast.AST, change: str) -> ast.AST:
        number, self.count = self.count, self.count + 1
        if number not in self.numbers:
            return node
        switch = ast.parse(f"_mutant_is_on({len(self.found)})", mode="eval").body
        self.found.append(Mutant(len(self.found), f"{self.path}:{getattr(node, 'lineno', 0)}", change))
        if isinstance(node, ast.stmt):
            return ast.copy_location(ast.If(ast.UnaryOp(ast.Not(), switch), [node], []), node)
        other = changed(node)
        assert other is not None and isinstance(node, ast.expr)
        return ast.copy_location(ast.IfExp(switch, other, node), node)


def run(folder: Path, marks: str, arguments: list[str], timeout: float, **environment: str) -> str:
    """Run pytest in the copy, and return its output, or a message after the timeout."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "-m", marks, *arguments]
    given = {**os.environ, "PJRT_DEVICE": "CPU", "PYTHONPATH": str(folder), **environment}
    try:
        done = processes.run(command, timeout=timeout, fresh=True, cwd=folder, env=given)
    except subprocess.TimeoutExpired:
        return f"FAILED (not ended after {timeout:.0f} s)"
    return done.stdout + done.stderr


class Suite:
    """Run the tests with some marks; return the tests that reach each mutant, and the seconds of each passing test."""

    def __init__(self, folder: Path, marks: str, jobs: str, chosen: list[str]) -> None:
        self.folder, self.marks = folder, marks
        self.seen: dict[int, set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = defaultdict(float)
        notes = folder / "seen"
        notes.write_text("")
        arguments = ["-n", jobs, "--durations=0", "--durations-min=0", "-rfE", *chosen]
        output = run(folder, marks, arguments, 7200, MUTANTS_SEEN=str(notes))
        print(output[-500:], flush=True)
        failed = set(re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", output, re.M))
        for time, test in re.findall(r"^ *([\d.]+)s (?:call|setup|teardown) +(\S.*)$", output, re.M):
            self.seconds[test] += float(time)
        passed = self.seconds.keys() - failed
        of_file = defaultdict(set)
        for test in passed:
            of_file[test.partition("::")[0]].add(test)
        for line in notes.read_text().splitlines():
            number, _, test = line.partition(" ")
            self.seen[int(number)] |= of_file[test] | {test} & passed

    def killer(self, number: int, seconds: float) -> str:
        """Return the test that kills a mutant, or another reason why the run ended; "" if it survives."""
        taken: list[str] = []
        spent = 0.0
        for test in sorted(self.seen[number], key=lambda test: (self.seconds[test], test)):
            spent += self.seconds[test]
            if taken and spent > seconds:
                break
            taken.append(test)
        if not taken:
            return ""
        output = run(self.folder, self.marks, ["-x", "-rfE", *taken], 300 + 3 * seconds, MUTANT=str(number))
        failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, re.M)
        ended = re.search(r"^\d+ passed", output, re.M)
        return failed[1] if failed else "" if ended else output[-200:]


def judged(
    folder: Path, each: list[Mutant], jobs: str, seconds: float, soaks: bool, chosen: list[str]
) -> Iterator[Mutant]:
    """Run the tests of each mutant."""
    quick = Suite(folder, "not soak", jobs, chosen)
    soak = Suite(folder, "soak", jobs, chosen) if soaks else None
    for mutant in random.Random(0).sample(each, len(each)):  # an interrupted run leaves folders
        mutant.tests, mutant.killer = len(quick.seen[mutant.number]), quick.killer(mutant.number, seconds)
        if soak is not None:
            mutant.soak = len(soak.seen[mutant.number])
            mutant.soak_killer = "" if mutant.killer else soak.killer(mutant.number, seconds)
        yield mutant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="of mutants (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests for a mutant (default: 60)")
    parser.add_argument("--jobs", default="2", help="processes of the first run (default: 2)")
    parser.add_argument("--soak", action="store_true", help="run the tests of the soak on what has survived")
    parser.add_argument("--out", type=Path, help="a JSON file that is written as mutants are judged")
    parser.add_argument("tests", nargs="*", help="of these alone (default: all quick ones)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        folder = Path(temporary, "checkout")
        left = shutil.ignore_patterns(
            ".git", ".venv", "build", "*.egg-info", "__pycache__", ".mypy_cache", ".ruff_cache"
        )
        shutil.copytree(ROOT, folder, symlinks=True, ignore=left)
        drawn, found = mutants(folder, args.count, args.seed), []
        for mutant in judged(folder, drawn, args.jobs, args.seconds, args.soak, args.tests):
            found.append(asdict(mutant))
            became = mutant.killer or (mutant.soak_killer and f"SURVIVED but for {mutant.soak_killer}")
            became = became or ("SURVIVED" if mutant.tests + mutant.soak else "no test came by")
            print(f"{mutant.place}  {mutant.change}  {mutant.tests} tests: {became}", flush=True)
            if args.out:
                args.out.write_text(json.dumps(found, indent=1) + "\n")
        reached = [one for one in found if one["tests"]]
        killed = sum(bool(one["killer"]) for one in reached)
        others = sum(bool(one["soak_killer"]) for one in found)
        print(f"{len(found)} mutants: {len(found) - len(reached)} that no test came by, {killed} killed")
        if args.soak:
            print(f"{others} more killed by the soak alone")


if __name__ == "__main__":
    main()
