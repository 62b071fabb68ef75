"""``doctor``: show the versions, libraries and devices of this installation, and their problems."""

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from kfac_engine import __version__
from kfac_engine.cli.command import command
from kfac_engine.cli.display import print_json, print_table, say
from kfac_engine.cli.options import json_option
from kfac_engine.summary import installed_version
from kfac_engine.system.memory_limits import usable_cores

_PACKAGES = (
    "numpy", "scipy", "onnx", "onnxruntime", "onnxruntime-gpu", "safetensors",
    "threadpoolctl", "cupy-cuda12x", "cupy-cuda13x", "matplotlib",
)  # fmt: skip

# Variables of the environment that select another kernel than the processor's own, by BLAS library.
_KERNEL_VARIABLES = {
    "openblas": ("OPENBLAS_CORETYPE",),
    "mkl": ("MKL_DEBUG_CPU_TYPE", "MKL_ENABLE_INSTRUCTIONS"),
    "blis": ("BLIS_ARCH_TYPE",),
}
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS",
)  # fmt: skip

# OpenBLAS kernels without AVX2; on a processor that has it they are several times too slow.
_OLD_KERNELS = ("Prescott", "Nehalem", "Core2", "Penryn", "Dunnington", "Atom", "Sandybridge")


@command(
    "Show versions, libraries, threads, the GPU and the selected backend.",
    "kfac-engine doctor",
    json_option,
)
def doctor(as_json: bool) -> None:
    report = examine()
    if as_json:
        print_json(report)
    else:
        _print_report(report)


def examine() -> dict[str, Any]:
    """Return all facts of the report as values that JSON can hold."""
    from kfac_engine.backend.threads import default_count

    report: dict[str, Any] = {
        "kfac_engine": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": {"machine": os.cpu_count(), "usable": usable_cores()},
        "threads": default_count(),  # of an engine
        "packages": {name: installed_version(name) for name in _PACKAGES},
        "blas": _blas_libraries(),
        "environment": {
            name: os.environ[name]
            for name in (*chain(*_KERNEL_VARIABLES.values()), *_THREAD_VARIABLES)
            if name in os.environ
        },
        "gpu": _gpus(),
        "backend": _backend(),
    }
    report["warnings"] = _warnings(report)
    return report


def _blas_libraries() -> list[dict[str, object]]:
    # NumPy and SciPy each bring a BLAS of their own: import both so that both are loaded.
    import numpy  # noqa: F401  # loaded for its library
    import scipy.linalg  # noqa: F401  # loaded for its library
    from threadpoolctl import threadpool_info

    return [
        {
            "library": library["internal_api"],
            "version": library.get("version"),
            "kernel": library.get("architecture"),
            "threads": library["num_threads"],
            "path": library["filepath"],
        }
        for library in threadpool_info()
        if library["user_api"] == "blas"
    ]


def _gpus() -> dict[str, object]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"devices": [], "reason": "nvidia-smi was not found"}
    query = "--query-gpu=name,memory.total,driver_version,compute_cap"
    try:
        answer = subprocess.run(
            [program, query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"devices": [], "reason": f"nvidia-smi failed: {error}"}
    devices = [line.strip() for line in answer.stdout.splitlines() if answer.returncode == 0]
    reason = "" if devices else f"nvidia-smi says: {(answer.stderr or answer.stdout).strip()}"
    return {"devices": devices, "reason": reason}


def _backend() -> dict[str, str]:
    from kfac_engine.backend.select import choice_reason, memory_space_of, select
    from kfac_engine.sessions.device_session import available_memory_space

    backend = select("auto")
    model = available_memory_space(memory_space_of(backend)).name
    return {"auto": backend.name, "reason": choice_reason("auto"), "model": model}


def _warnings(report: Mapping[str, Any]) -> list[str]:
    environment, usable = report["environment"], report["cores"]["usable"] or 1
    has_avx2 = "avx2" in _processor_flags()
    warnings = []
    if all(report["packages"].get(name) for name in ("onnxruntime", "onnxruntime-gpu")):
        warnings.append(
            "onnxruntime and onnxruntime-gpu are both installed and own the same files: uninstall "
            "both, then install one of them."
        )
    for library in report["blas"]:
        name = Path(library["path"]).name
        warnings += [
            f"{variable}={environment[variable]} overrides the kernel of {name}; unset it unless "
            "you mean to."
            for variable in _KERNEL_VARIABLES.get(library["library"], ())
            if variable in environment
        ]
        if has_avx2 and library["kernel"] in _OLD_KERNELS:
            warnings.append(
                f"{name} runs its {library['kernel']} kernel although this processor has AVX2: "
                "matrix products take several times as long as with a newer kernel."
            )
        if library["threads"] > usable:
            warnings.append(f"{name} uses {library['threads']} threads on {usable} usable cores.")
    return warnings


def _processor_flags() -> frozenset[str]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    return frozenset(next((line.split() for line in lines if line.startswith("flags")), []))


def _print_report(report: Mapping[str, Any]) -> None:
    cores, gpu, backend = report["cores"], report["gpu"], report["backend"]
    rows = [
        ("kfac_engine", report["kfac_engine"]),
        ("Python", f"{report['python']} on {report['platform']}"),
        ("cores", f"{cores['usable']} usable of {cores['machine']}"),
        (
            "threads",
            f"{report['threads']} by default, in ONNX Runtime and outside, BLAS on one in each; "
            "divided by the ranks of MPI on this node",
        ),
        *((name, version or "not installed") for name, version in report["packages"].items()),
        *(
            (
                "BLAS",
                f"{library['library']} {library['version']}, {library['kernel']} kernel, "
                f"{library['threads']} threads ({Path(library['path']).name})",
            )
            for library in report["blas"]
        ),
        *((f"${name}", setting) for name, setting in report["environment"].items()),
        ("GPU", "; ".join(gpu["devices"]) or f"none ({gpu['reason']})"),
        ("backend", f"auto picks {backend['reason']}"),
        ("model", f"runs on {backend['model']}"),
    ]
    print_table("kfac_engine doctor", ("fact", "value"), rows, sentences="value")
    for warning in report["warnings"]:
        say(f"warning: {warning}")
