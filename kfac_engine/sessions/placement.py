"""The memory space that a model runs in: the GPU of its curvature, or the host."""

import logging
from functools import cache

import numpy as np

from kfac_engine.backend.memory_space import HOST, MemorySpace
from kfac_engine.errors import BackendError, MemoryLimitError
from kfac_engine.graph.structure import Input, Node
from kfac_engine.graph.write import CompactModel, compact_model
from kfac_engine.sessions.device_session import DeviceSession, has_provider
from kfac_engine.sessions.session import Session

# The optimizations of ONNX Runtime take time quadratic in the number of nodes: 20 s instead of 4 s
# for a chain of 40,000 nodes. Long graphs are mostly unrolled loops, which do not run faster
# with them.
_MOST_OPTIMIZED = 5000

_LOG = logging.getLogger(__name__)
_FLOAT = np.dtype(np.float32)

# Operand of the trial. Every precision multiplies its small integers exactly.
_TRIAL = ((1.0, 2.0), (3.0, 4.0))
_TRIAL_RESULT = ((14.0, 20.0), (30.0, 44.0))


def available_memory_space(wanted: MemorySpace) -> MemorySpace:
    """Return the memory space that models run in, and log the choice.

    It is ``wanted``, which has the arrays of the backend, if ONNX Runtime can compute there, else
    the host.
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
        f"the model runs in ONNX Runtime on the CPU, and the inputs of its curvature are copied to "
        f"the GPU through pinned memory: {reason}",
    )
    return HOST


def open_session(
    model: CompactModel, *, threads: int, what: str, memory_space: MemorySpace
) -> Session | DeviceSession:
    """Return a new session in a memory space; the arguments are as for ``DeviceSession``."""
    optimize = model.nodes <= _MOST_OPTIMIZED
    if memory_space is HOST:
        return Session(model, threads=threads, optimize=optimize, what=what)
    return DeviceSession(
        model, threads=threads, optimize=optimize, what=what, memory_space=memory_space
    )


@cache
def _obstacle(memory_space: MemorySpace) -> str | None:
    """Return the reason why ONNX Runtime cannot compute in a memory space, or None.

    A trial runs a small model there.
    """
    if not has_provider(memory_space.kind):
        return "the installed package was built without CUDA (docs/gpu.md names another one)"
    nodes = (Node("MatMul", ("x", "x"), ("xx",)), Node("Conv", ("xx", "w"), ("y",)))
    inputs = [Input("x", _FLOAT, (1, 1, None, 2)), Input("w", _FLOAT, (1, 1, 1, 1))]
    model = compact_model(nodes, inputs, ("y",), {}, 18, name="trial")
    x = memory_space.as_feed(np.array([[_TRIAL]], _FLOAT))
    w = memory_space.as_feed(np.full((1, 1, 1, 1), 2, _FLOAT))
    try:
        session = DeviceSession(model, threads=1, what="a trial", memory_space=memory_space)
        result = memory_space.on_host(session.run(("y",), {"x": x, "w": w})["y"])
    except (BackendError, MemoryLimitError) as failure:
        return str(failure).rstrip(".")
    if result.tolist() != [[[list(row) for row in _TRIAL_RESULT]]]:
        return f"a trial returned {result.tolist()}"
    return None


@cache
def _say(level: int, text: str) -> None:
    """Log a message that every engine repeats, once in a process."""
    _LOG.log(level, text)
