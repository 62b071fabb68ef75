"""Facts about the machine that times depend on: processor, libraries, BLAS kernels, threads."""

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from threadpoolctl import threadpool_info

from kfac_engine.system.memory_limits import usable_cores

_PACKAGES = (
    "numpy", "scipy", "onnxruntime", "torch", "jax", "kfac-jax", "curvlinops-for-pytorch",
    "laplace-torch", "kronfluence",
)  # fmt: skip
# Environment variable that selects a kernel of OpenBLAS.
_KERNEL_VARIABLE = "OPENBLAS_CORETYPE"
_AVX512, _OLDER_KERNELS = "avx512f", frozenset({"Haswell", "Zen", "Sandybridge", "Prescott"})


def machine(threads: int) -> dict[str, Any]:
    """Return the facts as values that JSON can hold."""
    blas = [
        {
            "library": library["internal_api"],
            "version": library["version"],
            "kernel": library.get("architecture"),
        }
        # NumPy and SciPy may each bring their own.
        for library in threadpool_info()
        if library["user_api"] == "blas"
    ]
    # The order of loading is arbitrary.
    blas.sort(key=str)
    return {
        "platform": platform.platform(),
        "processor": _processor("model name"),
        "cores": usable_cores(),
        "threads": threads,
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": {name: installed for name in _PACKAGES if (installed := _version(name))},
        "blas": blas,
        "warnings": _warnings([str(library["kernel"]) for library in blas]),
    }


def print_machine(console: Console, facts: Mapping[str, object]) -> None:
    """Print the facts of ``machine``, one a line, and the use of threads."""
    for name, value in facts.items():
        for item in value if isinstance(value, list) else [value]:
            pairs = item.items() if isinstance(item, dict) else ()
            text = ", ".join(f"{key} {entry}" for key, entry in pairs) or item
            console.print(f"{name}: {text}")
    threads = "a single thread" if facts["threads"] == 1 else f"{facts['threads']} threads"
    console.print(
        f"every contender works in a process with {threads}: peers and the "
        "definition in their BLAS, ours in workers whose BLAS has one each, and in ONNX Runtime"
    )


def _warnings(kernels: list[str]) -> list[str]:
    forced = os.environ.get(_KERNEL_VARIABLE)
    older = _OLDER_KERNELS.intersection(kernels)
    warnings = []
    if forced:
        warnings.append(
            f"{_KERNEL_VARIABLE}={forced} overrides the kernel that OpenBLAS would pick here; "
            "unset it unless you mean to."
        )
    if older and _AVX512 in _processor("flags").split():
        warnings.append(
            f"BLAS runs its {', '.join(sorted(older))} kernel although this processor has AVX-512: "
            "products take up to twice as long as with a newer kernel."
        )
    return warnings


def _processor(field: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo, or an empty text."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(field))
    return next(values, "")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
