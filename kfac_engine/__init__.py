"""Natural-gradient (K-FAC) preconditioning for any ONNX model, without a framework.

Everything public is listed in ``__init__.pyi`` and is imported at its first use, so that ``import
kfac_engine`` is quick.
"""

import re
from importlib import import_module
from pathlib import Path

__version__ = "0.1.0"

_stub = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
# Public name to the module that defines it.
_HOMES = {
    name: module
    for module, names in re.findall(r"^from (\S+) import ([^()\n]+|\([^)]+\))$", _stub, re.M)
    for name in re.findall(r"\w+ as (\w+)", names)
}

__all__ = ["__version__", *_HOMES]

# In a checkout that was never installed, `kernels/` and `bench/` lie beside this package, not
# inside: let `kfac_engine.kernels` and `kfac_engine.bench` be found there, as the wheel maps them.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "kernels").is_dir():
    __path__.append(str(_checkout))


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'kfac_engine' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
