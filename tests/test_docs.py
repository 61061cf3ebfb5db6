"""The documentation: its programs run, its links have targets, and no public name is missing."""

import ast
import importlib
import inspect
import json
import os
import re
import runpy
import sys

import processes
import pytest
import xla_flags
from pages import ROOT, SITE, Page, pages

PAGES = {page.name: page for page in pages()}
WITH_PROGRAMS = [name for name, page in PAGES.items() if page.program or page.files]
# The first program for newcomers, which both pages share: `make test` runs the README's, `make soak` the others.
FIRST = {"README.md", "index.md"}
CHOSEN = "WARNING:root:Defaulting to PJRT_DEVICE=CPU\n"  # torch_xla prints this if no variable is set
# These programs, and programs that import torch_xla, run in a new Python without variables, so that its output shows.
ANEW = FIRST | {"howto/from-torch-xla.md", "howto/hugging-face.md", "howto/timm.md"}
NEEDS_PREFLIGHT = {"guides/preflight.md", "guides/large-models.md"}


def parameters():
    for name in WITH_PROGRAMS:
        marks = [pytest.mark.slow if name == "README.md" else pytest.mark.soak]
        if name in NEEDS_PREFLIGHT:
            marks.append(pytest.mark.skipif(sys.version_info < (3, 11), reason="the TPU's compiler needs Python 3.11"))
        yield pytest.param(name, marks=marks)


def without_numbers(text):
    """Return lines for comparison: times, last digits and widths differ between machines."""
    number = re.compile(r"\d[\d,]*(\.\d+)?(e-\d+)?")
    waited = re.compile(r" - waited for data: \d+%$", re.M)  # as may happen on a busy machine
    return [re.sub(r"\s+", " ", number.sub("N", line)).strip() for line in waited.sub("", text).splitlines()]


@pytest.mark.parametrize("name", list(parameters()))
def test_the_programs_of_a_page_print_its_output(run_python, tmp_path, name):
    page = PAGES[name]
    output = ""
    for number, (title, code) in enumerate({**page.files, "": page.program}.items()):
        if not code:
            continue
        path = tmp_path / (title or f"page{number}.py")
        path.write_text(code)
        environment = {"TQDM_DISABLE": "1"}
        if name in ANEW:
            environment["PJRT_DEVICE"] = None
        if name in FIRST:  # only these compile for long
            environment["XLA_FLAGS"] = xla_flags.as_users_have_it() or None
        # Whether the data come fast enough depends on the machine.
        run = "import runpy, sys, warnings; warnings.filterwarnings('ignore', 'the device waited for data'); "
        run += f"sys.argv = [{str(path)!r}]; runpy.run_path({str(path)!r}, run_name='__main__')"
        process = run_python(run, timeout=600, env=environment)
        assert process.returncode == 0, process.stderr
        assert process.stderr.replace(CHOSEN, "") == ""
        output += process.stdout
    printed = without_numbers(output)
    assert [line for line in without_numbers("\n".join(page.printed)) if line not in printed] == []


@pytest.mark.soak
@pytest.mark.skipif(sys.version_info < (3, 11), reason="the TPU's compiler needs Python 3.11")
def test_the_command_of_the_preflight_guide(run_python, tmp_path):
    page = PAGES["guides/preflight.md"]
    (tmp_path / "train.py").write_text(page.files["train.py"])
    lines = [line for block in page.blocks if block.language == "sh" for line in block.code.splitlines()]
    [command] = [line for line in lines if line.startswith("python -m tpufit preflight")]
    process = run_python(
        f"from tpufit.__main__ import main; raise SystemExit(main({command.split()[3:]!r}))", timeout=600
    )
    assert process.returncode == 0, process.stderr
    printed = without_numbers(process.stdout)
    assert [line for line in without_numbers("\n".join(page.printed)) if line not in [*printed, "True True"]] == []


@pytest.mark.parametrize("name", PAGES)
def test_other_code_on_a_page_is_python(name):
    for block in PAGES[name].blocks:
        if block.language in ("python", "py"):
            ast.parse(block.code)


@pytest.mark.parametrize("name", PAGES)
def test_the_links_of_a_page_have_targets(name):
    page = PAGES[name]
    for link in page.links:
        if re.match(r"https?://", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.path.parent / target).resolve() if target else page.path
        assert path.exists(), link
        if anchor in ("only-light", "only-dark") or not anchor or path.suffix != ".md" or "reference" in path.parts:
            continue
        assert anchor in Page(path).anchors, link


@pytest.mark.parametrize("name", PAGES)
def test_files_that_a_page_names_exist(name):
    paths = re.findall(r"\b(?:examples|docs|tests|callbacks|tpufit)/[\w/]+\.\w+", PAGES[name].text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", [name for name in PAGES if name not in ("benchmarks.md", "README.md")])
def test_pages_dont_mention_tests(name):
    assert re.findall(r"test_\w+\.py", PAGES[name].text) == []


def test_the_proofs_of_the_readmes_promises_exist():
    tests = ROOT / "tests"
    cited = re.findall(r"`([\w/]+)(\.py)?(?:::(\w+))?`", (tests / "README.md").read_text().partition("| --- |")[2])
    files = [(f"{name}{ending}", test) for name, ending, test in cited if (tests / f"{name}{ending}").exists()]
    assert len(files) > 40 and {name for name, _ in files} >= {"test_fit.py", "faults/test_kills.py", "benchmarks/"}
    missing = [name for name, ending, _ in cited if ending and not (tests / f"{name}{ending}").exists()]
    missing += [test for name, test in files if test and f"def {test}(" not in (tests / name).read_text()]
    assert missing == []


def test_the_page_about_torch_xla_equals_its_record():
    operations = runpy.run_path(str(ROOT / "docs" / "operations.py"))
    assert PAGES["reference/operations.md"].text == operations["write"](json.loads(operations["RECORD"].read_text()))


def test_every_page_is_in_the_menu():
    menu = (ROOT / "docs" / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert [name for name in PAGES if name != "README.md" and f" {name}\n" not in menu] == []


def test_every_example_is_on_their_page():
    found = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")}
    assert found == {link.rpartition("/")[2] for link in PAGES["examples.md"].links}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def public_names():
    """Return all names that a user may import, in full."""
    for module in ("tpufit", "tpufit.callbacks", "tpufit.data"):
        names = importlib.import_module(module).__all__
        yield from (f"{module}.{name}" for name in names if not name.startswith("__"))
    errors = importlib.import_module("tpufit.errors")
    for name, value in vars(errors).items():
        if inspect.isclass(value) and value.__module__ == "tpufit.errors":
            yield f"tpufit.errors.{name}"
    for module in ("tpufit.diagnostics.plots", "tpufit.preflight.report"):
        found = vars(importlib.import_module(module)).values()
        own = (value for value in found if getattr(value, "__module__", "") == module and value.__name__[0] != "_")
        yield from (f"{module}.{value.__name__}" for value in own)


def test_every_public_name_is_in_the_reference():
    shown = re.findall(r"^::: (\S+)$", "\n".join(path.read_text() for path in SITE.glob("reference/*.md")), re.M)
    assert len(shown) == len(set(shown))
    # A function with its module's name: by the shorter name the whole module would be shown.
    shown = [name.replace("tpufit.data.stream.stream", "tpufit.data.stream") for name in shown]
    inner = {f"tpufit.diagnostics.plots.{name}" for name in ("close", "make_axes", "require_matplotlib")}
    inner |= {"tpufit.preflight.report.estimate_price", "tpufit.preflight.report.find_exit_status"}
    assert sorted({*public_names()} - inner - {*shown}) == []


def test_every_name_of_a_loss_a_metric_or_an_optimizer_is_in_the_reference():
    from tpufit import losses, optimizers
    from tpufit.metrics import metric_names

    text = (SITE / "reference" / "names.md").read_text()
    names = [*losses.NAMES, *metric_names.NAMES, *optimizers.NAMES]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_every_option_of_the_command_line_is_in_the_reference(run_python):
    text = (SITE / "reference" / "command-line.md").read_text()
    for command in ("doctor", "preflight", "verify"):
        helped = run_python(f"from tpufit.__main__ import main; main(['{command}', '--help'])").stdout
        options = {*re.findall(r"--[a-z-]+", helped)} - {"--help"}
        assert options and [option for option in options if f"`{option}" not in text] == []


@pytest.mark.soak
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "docs" / "mkdocs.yml")]
    command += ["--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    process = processes.run(command, timeout=300, env=environment)
    assert process.returncode == 0, process.stdout + process.stderr
    assert (tmp_path / "site" / "reference" / "model.html").is_file()
    assert (tmp_path / "site" / "examples" / "digits.py").is_file()
    assert 'href="../examples/gan.py"' in (tmp_path / "site" / "guides" / "custom-steps.html").read_text()
