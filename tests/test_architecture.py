"""The import rules of ARCHITECTURE.md hold."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.violations import assert_none

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kfac_engine"
SOURCES = sorted(
    path
    for folder in ("kfac_engine", "kernels", "bench", "scripts", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
MODULES = [path for path in SOURCES if path.is_relative_to(PACKAGE)]

# Third-party import name to the places that may import it.
RESERVED = {
    "onnx": ("kfac_engine/graph/",),
    "onnxruntime": ("kfac_engine/sessions/",),
    "cupy": ("kfac_engine/backend/cuda/device.py",),
    "mpi4py": ("kfac_engine/distributed/mpi.py",),
    "sklearn": ("kfac_engine/sklearn/", "bench/training/data.py"),
    "torch": ("kfac_engine/torch.py", "bench/"),
    "cupyx": ("kfac_engine/backend/cuda/device.py",),
}


def identify(path):
    return path.relative_to(ROOT).as_posix()


@cache
def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported_modules(nodes):
    """Dotted names as written; `from a import b` counts as `a.b`, a module or a name in one."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def imports(path):
    return tuple(imported_modules(ast.walk(parse(path))))


@cache
def unit(dotted):
    """The unit of the rank table that holds a dotted name: the longest one that matches."""
    name = dotted.removeprefix("kfac_engine").lstrip(".")
    matches = [row for row in places() if f"{name}.".startswith(f"{row}.")]
    return max(matches, key=len, default="__init__")


@cache
def places():
    """Unit to (rank, place in the row's arrows), from the table in ARCHITECTURE.md."""
    rows = re.findall(
        r"^\| (\d) \| ([^|]*) \|", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), re.M
    )
    return {
        name: (int(rank), place)
        for rank, cell in rows
        for place, group in enumerate(cell.split("→"))
        for name in re.findall(r"`([\w.]+)`", group)
    }


def test_the_rank_table_has_seven_rows():
    assert {rank for rank, _ in places().values()} == set(range(7))


def exists(name, *folders):
    """Whether a package or a module of this dotted name is in one of the folders."""
    paths = [folder / name.replace(".", "/") for folder in folders]
    return any(path.is_dir() or path.with_suffix(".py").is_file() for path in paths)


def test_a_name_in_the_rank_table_is_a_package_or_module():
    assert_none(name for name in places() if not exists(name, PACKAGE, ROOT))


def test_a_file_named_in_the_architecture_exists():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    names = re.findall(r"`([\w/]+(?:\.py|/))`", text)
    assert len(names) > 30
    assert_none(name for name in names if not list(ROOT.rglob(name)))
    assert len(text.encode()) <= 8000, "ARCHITECTURE.md is read in ten minutes"


def test_names_in_recipes_exist():
    text = "\n".join(path.read_text(encoding="utf-8") for path in MODULES)
    recipes = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("| to add |")[2]
    for name in re.findall(r"`([^`]+)`", recipes):
        if name.startswith("python -m "):
            paths = [name.removeprefix("python -m ").replace(".", "/") + ".py"]
        elif re.fullmatch(r"\w+\.\w+", name) and not name.endswith((".py", ".md")):
            paths = ["**/" + name.split(".")[0] + ".py"]
            assert re.search(rf"^def {name.split('.')[1]}\(", text, re.M), name
        elif "/" in name or "." in name:
            paths = [name.replace("<family>", "*")]
        else:
            assert re.search(rf"^(class |def )?{name}\b", text, re.M), name
            continue
        assert any(list(root.glob(path)) for root in (PACKAGE, ROOT) for path in paths), name


def test_imports_go_up_the_rank_table():
    paths = [path for path in MODULES if path != PACKAGE / "__init__.py"]
    assert_none(f"{identify(path)}: {problem}" for path in paths for problem in wrong_imports(path))


def wrong_imports(path):
    """What contradicts the rank table in a module."""
    own = unit(dotted_name(path))
    if len(path.relative_to(PACKAGE).parts) == 1 and own != path.stem:
        yield "has no rank in ARCHITECTURE.md"
        return
    for name in imports(path):
        target = unit(name)
        if name.split(".")[0] != "kfac_engine" or target == own:
            continue
        if name.startswith("kfac_engine.kernels"):
            if not identify(path).startswith("kfac_engine/backend/cuda/"):
                yield f"must not import {name}"
        elif not places()[target] < places()[own]:
            yield f"{own} must not import {name}"


def test_every_package_has_a_rank():
    for path in MODULES:
        if path.name == "__init__.py" and path.parent not in {
            PACKAGE,
            PACKAGE / "analysis",
            PACKAGE / "curvature",
        }:
            assert unit(dotted_name(path)) != "__init__", identify(path)


def test_at_most_ten_modules_are_at_top_level():
    assert len(list(PACKAGE.glob("*.py"))) <= 10


def test_reserved_libraries_are_imported_in_listed_modules_only():
    assert_none(
        f"{identify(path)} imports {name}"
        for path in SOURCES
        if not identify(path).startswith(("tests/", "scripts/"))
        for name in imports(path)
        if not identify(path).startswith(RESERVED.get(name.split(".")[0], ""))
    )


def test_no_import_cycle_among_modules():
    graph = {dotted_name(path): set(own_imports(path)) for path in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def dotted_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def names_of_modules():
    return frozenset(map(dotted_name, MODULES))


def own_imports(path):
    """Modules that a module imports anywhere, for types as well."""
    known = names_of_modules()
    for name in imports(path):
        module = name if name in known else name.rpartition(".")[0]
        if module in known and module != dotted_name(path):
            yield module


def test_kernels_import_only_errors():
    for path in (ROOT / "kernels").rglob("*.py"):
        for name in imports(path):
            known = "kfac_engine.errors", "kfac_engine.kernels"
            assert not name.startswith("kfac_engine") or name.startswith(known)


def test_curvature_of_named_arrays_needs_no_module_that_reads_onnx():
    code = "import sys, kfac_engine.curvature.fisher; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert "kfac_engine.curvature.fisher" in loaded
    onnx = ("autodiff", "graph", "runtime", "sessions")
    readers = ("onnx", "onnxruntime", *(f"kfac_engine.{package}" for package in onnx))
    assert not [name for name in loaded if name.startswith(readers)]


def test_oracle_imports_no_project_module():
    names = imports(ROOT / "tests" / "oracle.py")
    assert names
    assert not [name for name in names if name.startswith(("kfac_engine", "tests"))]


def test_all_packages_are_listed_for_wheel():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {dotted_name(path) for path in MODULES if path.name == "__init__.py"}
    assert set(listed) == found | {
        "kfac_engine.kernels",
        "kfac_engine.bench",
        "kfac_engine.bench.training",
    }


def test_nothing_reads_environment_variables_but_doctor_and_those_of_launchers():
    readers = {"kfac_engine/cli/doctor.py", "kfac_engine/distributed/job.py"}
    assert_none(
        f"{identify(path)} reads {node.attr}"
        for path in MODULES
        if identify(path) not in readers
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "putenv"}
    )


def test_modules_of_the_glossary_exist():
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    names = named_in_last_column(page)
    assert len(names) > 40
    assert_none(name for name in names if not exists(name, PACKAGE, ROOT))


def named_in_last_column(page):
    cells = re.findall(r"^\|.*\| ([^|]*) \|$", page, re.M)
    return [name for cell in cells for name in re.findall(r"`([\w/]+)`", cell)]


# Participles that name no thing. A variable or an argument has the noun of the thing instead.
VAGUE_NAMES = {
    "found", "made", "some", "own", "kept", "asked", "turned", "given", "held", "taken", "told"
}  # fmt: skip


def names_of_variables(tree):
    """Names of variables, arguments and attributes that are set in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def test_no_variable_has_a_vague_name():
    assert_none(
        f"{identify(path)}: {name}"
        for path in SOURCES
        if not path.is_relative_to(ROOT / "tests")
        for name in sorted(VAGUE_NAMES.intersection(names_of_variables(parse(path))))
    )


def test_names_of_variables_cover_all_assignments():
    for code in (
        "made = 1", "made: int = 1", "self.made = 1", "def f(made): pass", "lambda *made: 0",
        "for made in x: pass", "[made for made in x]", "with x as made: pass", "(made := 1)",
    ):  # fmt: skip
        assert "made" in set(names_of_variables(ast.parse(code))), code
        assert "made" not in set(names_of_variables(ast.parse(code.replace("made", "maker")))), code
