"""Natural-gradient (K-FAC) preconditioning for any ONNX model, without a deep-learning framework."""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout that was never installed, `kernels/` and `bench/` lie beside this package, not inside:
# let `kfac_engine.kernels` and `kfac_engine.bench` be found there too, as the wheel maps them.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "kernels").is_dir():
    __path__.append(str(_checkout))
