"""Everything is found in a wheel, in an editable install and in a checkout never installed."""

import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.test_architecture import imported_modules

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = (
    ".git",
    ".venv",
    "build",
    "dist",
    "demo-output",
    "*.egg-info",
    "__pycache__",
    ".*_cache",
)
IMPORT_ALL = (
    "import kfac_engine, kfac_engine.kernels, kfac_engine.bench; print(kfac_engine.__file__)"
)
NEEDED = {
    "kfac_engine/py.typed",
    "kfac_engine/data/digits.npz",
    "kfac_engine/data/cnn.onnx",
    "kfac_engine/data/README.md",
    "kfac_engine/html_report/page.html",
    "kfac_engine/html_report/page.css",
    "kfac_engine/autodiff/rules/__init__.py",
    "kfac_engine/kernels/__init__.py",
    "kfac_engine/bench/__init__.py",
}


def imports_a_peer(path):
    """Whether a file is a Python module that imports a library that bench compares with."""
    if path.suffix != ".py":
        return False
    names = imported_modules(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return any(name.split(".")[0] in {"torch", "jax", "kfac_jax", "curvlinops"} for name in names)


def run_python(*arguments, folder, path=None, status=0):
    """Output of a fresh Python that finds the dependencies, and kfac_engine only in ``path``.

    Standard output, or standard error where a failure is expected.


    ``-S`` leaves out the ``.pth`` files by which an editable install would be found.
    """
    libraries = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    search = os.pathsep.join([str(path), *libraries] if path else libraries)
    done = subprocess.run(
        [sys.executable, "-S", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return (done.stderr if status else done.stdout).strip()


def build(kind, checkout, target):
    """A distribution of the checkout, built without network access."""
    code = f"from setuptools import build_meta as b; print(b.build_{kind}({str(target)!r}))"
    return target / run_python("-c", code, folder=checkout).splitlines()[-1]


def unpack(sdist, target):
    """The one folder in an sdist; ``extractall`` wants other arguments in each Python version."""
    with tarfile.open(sdist) as archive:
        for member in archive:
            if member.isfile():
                path = target / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.extractfile(member).read())
    (folder,) = target.iterdir()
    return folder


@pytest.fixture
def checkout(tmp_path):
    """A copy of the repository: builds leave traces beside the sources."""
    return Path(shutil.copytree(ROOT, tmp_path / "copy", ignore=shutil.ignore_patterns(*LEFT_OUT)))


@pytest.fixture
def empty(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def test_wheel_runs_from_empty_directory(checkout, empty, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(build("wheel", checkout, tmp_path)) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(site)
    assert not NEEDED - names
    assert not [name for name in names if name.startswith("kfac_engine/bench/peers")]
    # The front for PyTorch is loaded by its users only.
    assert [name for name in names if imports_a_peer(site / name)] == ["kfac_engine/torch.py"]
    assert {name.split("/")[0] for name in names} == {"kfac_engine", "kfac_engine-0.1.0.dist-info"}
    assert "kfac_engine-0.1.0.dist-info/licenses/LICENSE" in names
    assert run_python("-c", IMPORT_ALL, folder=empty, path=site).startswith(str(site))
    report = json.loads(
        run_python("-m", "kfac_engine", "doctor", "--json", folder=empty, path=site)
    )
    assert report["kfac_engine"] == "0.1.0"
    code = "from kfac_engine.bench.contenders import CONTENDERS as c; print(*c)"
    assert run_python("-c", code, folder=empty, path=site) == "definition ours ours-gradient"
    command = ["-m", "kfac_engine", "bench", "--compare", "torch"]
    refused = run_python(*command, folder=empty, path=site, status=2)
    assert "the installed package holds no peers" in refused


@pytest.mark.nightly
def test_peers_are_recognized_by_imports(checkout, empty):
    code = "from kfac_engine.bench.contenders import PEERS as p; print(*p)"
    assert run_python("-c", code, folder=empty, path=checkout).startswith("torch ")
    folder = checkout / "bench" / "peers"
    assert sum(imports_a_peer(path) for path in folder.glob("*.py")) >= 6


@pytest.mark.nightly
def test_wheel_from_sdist_has_same_files(checkout, tmp_path):
    (tmp_path / "direct").mkdir()
    (tmp_path / "indirect").mkdir()
    direct = build("wheel", checkout, tmp_path / "direct")
    unpacked = unpack(build("sdist", checkout, tmp_path), tmp_path / "unpacked")
    indirect = build("wheel", unpacked, tmp_path / "indirect")
    with zipfile.ZipFile(direct) as left, zipfile.ZipFile(indirect) as right:
        assert sorted(left.namelist()) == sorted(right.namelist())


@pytest.mark.nightly
def test_editable_install_finds_mapped_folders(checkout, empty, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(build("editable", checkout, tmp_path)) as wheel:
        wheel.extractall(site)
    code = f"import site; site.addsitedir({str(site)!r}); {IMPORT_ALL}"
    # The finder's module has the same name wherever kfac_engine is installed: this one comes first.
    assert run_python("-c", code, folder=empty, path=site).startswith(str(checkout))


@pytest.mark.nightly
def test_checkout_finds_mapped_folders(checkout, empty):
    assert run_python("-c", IMPORT_ALL, folder=empty, path=checkout).startswith(str(checkout))
