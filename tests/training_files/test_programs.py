"""The loops in C++, Java and C# have the losses of Python.

ONNXRUNTIME_INCLUDE names a folder with ``onnxruntime_cxx_api.h``, which the package of ONNX Runtime
for Python does not have; its library is that of the package. ONNXRUNTIME_JAR names the jar of ONNX
Runtime for Java, ONNXRUNTIME_DLL its assembly for C#, ``Microsoft.ML.OnnxRuntime.dll``.
"""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import kfac_engine as ke
from kfac_engine.data import demo_model
from scripts.browser_files import TRAIN, shuffled, write_digits
from tests.training_files.nets import updated

HEADERS = os.environ.get("ONNXRUNTIME_INCLUDE", "")
JAR = os.environ.get("ONNXRUNTIME_JAR", "")
ASSEMBLY = os.environ.get("ONNXRUNTIME_DLL", "")
LIBRARIES = sorted((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"))
EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
STEPS, BATCH = 12, 64
# The newest version of the format that the runtime in an old jar reads; the operators are the same.
IR_VERSION = 9

pytestmark = pytest.mark.nightly


def link_library(folder):
    """Put the library of the package for Python where compilers and programs look for it."""
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (folder / name).symlink_to(LIBRARIES[-1])


def in_cpp(folder):
    """Compile the program in C++; return the command that runs it."""
    link_library(folder)
    program, source = folder / "train", EXAMPLES / "cpp" / "train.cpp"
    options = ["-I", HEADERS, "-L", folder, "-l", "onnxruntime", "-o", program]
    subprocess.run(["g++", "-std=c++17", source, *options], check=True)
    return [program]


def in_java(folder):
    """Compile the program in Java without warnings; return the command that runs it."""
    source = EXAMPLES / "java" / "Train.java"
    options = ["-Xlint:all", "-Werror", "-cp", JAR, "-d", folder]
    subprocess.run(["javac", *options, source], check=True)
    return ["java", "-cp", f"{JAR}{os.pathsep}{folder}", "Train"]


def in_csharp(folder):
    """Compile the program in C# without warnings, with Mono; return the command that runs it."""
    link_library(folder)
    shutil.copy(ASSEMBLY, folder)  # Mono looks for assemblies beside the program
    program, source = folder / "Train.exe", EXAMPLES / "csharp" / "Train.cs"
    options = ["-warn:4", "-warnaserror", f"-r:{ASSEMBLY}", f"-out:{program}"]
    subprocess.run(["mcs", *options, source], check=True)
    return ["mono", program]


PROGRAMS = {
    "C++": (in_cpp, HEADERS and LIBRARIES and shutil.which("g++")),
    "Java": (in_java, JAR and shutil.which("javac")),
    "C#": (in_csharp, ASSEMBLY and LIBRARIES and shutil.which("mcs")),
}


@pytest.mark.parametrize("optimizer", ["kfac", "adamw"])
@pytest.mark.parametrize("language", PROGRAMS)
def test_losses_equal_those_of_python(language, optimizer, tmp_path):
    compiled, available = PROGRAMS[language]
    if not available:
        pytest.skip(f"needs a compiler for {language}, and ONNX Runtime for it")
    files = ke.export_training(demo_model("cnn"), optimizer=optimizer, path=tmp_path / "files")
    write_digits(tmp_path)
    for name in ("training.onnx", "initial.onnx"):
        model = onnx.load(files.folder / name)
        model.ir_version = IR_VERSION
        onnx.save(model, files.folder / name)
    printed = subprocess.run(
        list(map(str, [*compiled(tmp_path), files.folder, tmp_path / "digits.bin", STEPS])),
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    images, labels = shuffled()
    state, losses = files.initial(), []
    for step in range(STEPS):
        numbers = (step * BATCH + np.arange(BATCH)) % TRAIN
        results = files.step(state, {"image": images[numbers]}, labels[numbers])
        state |= updated(state, results)
        losses.append(float(results["loss"]))
    np.testing.assert_allclose([float(line) for line in printed.stdout.split()], losses, atol=1e-3)
