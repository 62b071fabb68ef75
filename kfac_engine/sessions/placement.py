"""Where a model runs: on the GPU that its curvature is on, if ONNX Runtime proves that it can."""

import logging
from functools import cache

import numpy as np

from kfac_engine.backend.memory_space import HOST, MemorySpace
from kfac_engine.errors import BackendError, MemoryLimitError
from kfac_engine.graph.compact import CompactModel, compact_model
from kfac_engine.graph.structure import Input, Node
from kfac_engine.sessions.device_session import DeviceSession, has_provider
from kfac_engine.sessions.session import Session

# ONNX Runtime optimizes in time quadratic in the nodes: a chain of dense layers with 40,000 of them
# takes 20 s, and 4 s without. The backward graph of an LSTM of 400 steps takes 6.9 s and 0.9 s, and
# both run equally fast: graphs of so many nodes are mostly loops that were unrolled.
_MOST_OPTIMIZED = 5000

_LOG = logging.getLogger(__name__)
_FLOAT = np.dtype(np.float32)

# Small whole numbers, which every precision multiplies exactly: a product, then a convolution.
_TRIAL = ((1.0, 2.0), (3.0, 4.0))
_TRIAL_RESULT = ((14.0, 20.0), (30.0, 44.0))


def available_memory_space(wanted: MemorySpace) -> MemorySpace:
    """Return the memory space that models run in, and log the choice.

    Args:
        wanted: Memory space of the arrays of the backend.

    Returns:
        ``wanted`` if ONNX Runtime can compute there, else the host.
    """
    if wanted is HOST:
        return HOST
    reason = _obstacle(wanted)
    if reason is None:
        _say(logging.INFO, f"the model runs in ONNX Runtime on {wanted.name}")
        return wanted
    level = logging.WARNING if has_provider(wanted.kind) else logging.INFO
    _say(
        level,
        f"the model runs in ONNX Runtime on the CPU, what its curvature reads is sent to the GPU "
        f"through pinned memory: {reason}",
    )
    return HOST


def open_session(
    model: CompactModel, *, threads: int, what: str, memory_space: MemorySpace
) -> Session | DeviceSession:
    """Open a session in a memory space; the arguments are those of ``DeviceSession``."""
    optimize = model.nodes <= _MOST_OPTIMIZED
    if memory_space is HOST:
        return Session(model, threads=threads, optimize=optimize, what=what)
    return DeviceSession(
        model, threads=threads, optimize=optimize, what=what, memory_space=memory_space
    )


@cache
def _obstacle(memory_space: MemorySpace) -> str | None:
    """Return why ONNX Runtime cannot compute in a memory space; None if a small model succeeds."""
    if not has_provider(memory_space.kind):
        return "the one that is installed was built without CUDA (docs/gpu.md has another)"
    nodes = (Node("MatMul", ("x", "x"), ("xx",)), Node("Conv", ("xx", "w"), ("y",)))
    inputs = [Input("x", _FLOAT, (1, 1, None, 2)), Input("w", _FLOAT, (1, 1, 1, 1))]
    model = compact_model(nodes, inputs, ("y",), {}, 18, name="trial")
    x = memory_space.as_feed(np.array([[_TRIAL]], _FLOAT))
    w = memory_space.as_feed(np.full((1, 1, 1, 1), 2, _FLOAT))
    try:
        session = DeviceSession(model, threads=1, what="a trial", memory_space=memory_space)
        found = memory_space.on_host(session.run(("y",), {"x": x, "w": w})["y"])
    except (BackendError, MemoryLimitError) as failure:
        return str(failure).rstrip(".")
    if found.tolist() != [[[list(row) for row in _TRIAL_RESULT]]]:
        return f"a trial gave {found.tolist()}"
    return None


@cache
def _say(level: int, text: str) -> None:
    """Log what every engine of a process would say again."""
    _LOG.log(level, text)
