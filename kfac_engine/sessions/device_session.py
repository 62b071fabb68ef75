"""Runs sessions that read and write a device's arrays, and selects the device.

Small integers, such as counts and shapes, stay on the host: operators read them there, and ONNX
Runtime would copy each of them back.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import finalize

import numpy as np
import onnxruntime as ort

from kfac_engine._types import Array, DType
from kfac_engine.backend.memory_space import HOST, MemorySpace, stays_on_host
from kfac_engine.errors import BackendError, MemoryLimitError
from kfac_engine.graph.structure import Input, Node
from kfac_engine.graph.write import CompactModel, compact_model
from kfac_engine.sessions import session
from kfac_engine.sessions.session import Session

# Device type to its provider. The CPU provider runs the operators that the provider lacks.
_PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}
_ERRORS = 3
_NO_MEMORY = "Failed to allocate memory"


def has_provider(kind: str) -> bool:
    """Return whether the installed ONNX Runtime supports devices of a kind."""
    return _PROVIDERS[kind] in ort.get_available_providers()


class DeviceSession(session.Uncopied):
    """A graph compiled for a memory space, with the methods of ``session.Session``.

    Args:
        model: Serialized graph, and constants outside it.
        threads: Number of threads within an operator on the CPU; 0 for the default of ONNX Runtime.
        optimize: Whether graph optimizations run.
        what: Description of the graph, for messages.
        memory_space: Memory space of the results.

    Raises:
        BackendError: ONNX Runtime refuses the graph, or its provider cannot be loaded.
    """

    def __init__(
        self,
        model: CompactModel,
        *,
        threads: int,
        optimize: bool = True,
        what: str,
        memory_space: MemorySpace,
    ) -> None:
        options = session.options_for(threads, optimize=optimize)
        options.use_deterministic_compute = True
        self._what = what
        self._memory_space = memory_space
        self._fed = {name: memory_space.as_feed(array) for name, array in model.fed.items()}
        copied = session.host_values(model.copied)
        options.add_external_initializers(list(copied), list(copied.values()))
        # ONNX Runtime 1.31 crashes where its provider for CUDA reads text.
        kind = "cpu" if model.reads_text else memory_space.kind
        provider = _PROVIDERS[kind]
        if kind == "cuda":
            _load_libraries()
        # ONNX Runtime would add the provider for the CPU in any case.
        providers = [
            (provider, _provider_options(memory_space) if kind == "cuda" else {}),
            *{"CPUExecutionProvider"} - {provider},
        ]
        try:
            self._session = ort.InferenceSession(model.proto, options, providers=providers)
        except session.FAILURES as failure:
            raise BackendError(
                f"ONNX Runtime {ort.__version__} cannot build {what}: {session.reason(failure)}"
            ) from failure
        if provider not in self._session.get_providers():
            raise BackendError(
                f"ONNX Runtime {ort.__version__} cannot load its {provider}; its own message above "
                f"names the reason"
            )
        # A run leaves a callback on the stream that frees pinned memory. ONNX Runtime 1.31 ends the
        # program (CUDA failure 800) if the session is released before this callback.
        finalize(self, memory_space.wait)
        self.output_dtypes: dict[str, DType] = session.array_types(self._session.get_outputs())
        self._hosted = frozenset(self._host_outputs())

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return the values of ``outputs`` for the arrays ``feeds``.

        Feeds are in the memory space or on the host. Results are in the memory space, but small
        integers are on the host. An operator that fails raises a BackendError, usually because the
        sizes of the feeds do not fit.
        """
        if any(array.dtype.kind not in "biuf" for array in feeds.values()):
            return self._run_on_copies(outputs, feeds)
        return self.run_into({}, feeds, outputs)

    def run_into(
        self, results: Mapping[str, Array], feeds: Mapping[str, Array], others: Sequence[str] = ()
    ) -> dict[str, Array]:
        """Write values of outputs to arrays of the caller without a copy, and return ``others``.

        Each array in ``results`` is in the memory space and has the shape and element type of its
        output. Feeds, returned values and errors are as for ``run``.
        """
        # Binding copies host feeds to memory that earlier work may still read, so it is ordered as
        # well.
        with self._memory_space.ordered():
            binding = self._bound(feeds)
            for name, array in results.items():
                binding.bind_output(name, *self._where(array))
            for name in others:
                space = self._memory_space_of(name)
                binding.bind_output(name, space.kind, space.index)
            self._evaluate(binding)
        values = dict(zip(others, binding.get_outputs()[len(results) :], strict=True))
        for name, value in values.items():
            if not value.has_value():
                raise BackendError(f"ONNX Runtime returned no value for '{name}' in {self._what}.")
        return {
            name: self._memory_space_of(name).adopt(value, self.output_dtypes[name])
            for name, value in values.items()
        }

    # -- private ----------------------------------------------------------------------------------

    def _host_outputs(self) -> Iterable[str]:
        """Yield the outputs that stay on the host: integers of rank 0, 1 or an unknown rank."""
        for output in self._session.get_outputs():
            dtype = self.output_dtypes.get(output.name)
            if dtype is not None and stays_on_host(dtype, len(output.shape or ())):
                yield output.name

    def _memory_space_of(self, name: str) -> MemorySpace:
        return HOST if name in self._hosted else self._memory_space

    def _where(self, array: Array) -> tuple[str, int, DType, tuple[int, ...], int]:
        """Return device type, device number, element type, shape and address of an array."""
        space = HOST if isinstance(array, np.ndarray) else self._memory_space
        return space.kind, space.index, array.dtype, array.shape, space.address(array)

    def _bound(self, feeds: Mapping[str, Array]) -> Any:
        """Return a binding of the feeds, whose memory must stay allocated until the run."""
        binding = self._session.io_binding()
        arrays = {**feeds, **self._fed}
        # An empty array has no address on a device, and no entry is read.
        on_host = {
            name: array if isinstance(array, np.ndarray) else np.empty(array.shape, array.dtype)
            for name, array in arrays.items()
            if isinstance(array, np.ndarray) or not array.size
        }
        try:
            for name, value in session.host_values(on_host).items():
                binding.bind_ortvalue_input(name, value)
            for name in arrays.keys() - on_host.keys():
                binding.bind_input(name, *self._where(arrays[name]))
        except (RuntimeError, ValueError) as failure:  # the exceptions of binding
            raise self._failed(failure) from failure
        return binding

    def _run_on_copies(
        self, outputs: Sequence[str], feeds: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Return the values of outputs from host copies: arrays of text cannot be bound."""
        arrays = {
            name: self._memory_space.on_host(array)
            for name, array in {**feeds, **self._fed}.items()
        }
        try:
            results = self._session.run(list(outputs), arrays)
        except session.FAILURES as failure:
            raise self._failed(failure) from failure
        return {
            name: self._memory_space_of(name).as_feed(array)
            for name, array in zip(outputs, results, strict=True)
        }

    def _evaluate(self, binding: Any) -> None:
        # A run that does not wait for the device (disable_synchronize_execution_providers) would
        # keep its pinned memory until the session is released.
        try:
            self._attempt(binding)
        except RuntimeError as failure:  # the exception of bound runs
            raise self._failed(failure) from failure

    def _attempt(self, binding: Any) -> None:
        try:
            self._session.run_with_iobinding(binding)
        except RuntimeError as failure:
            if _NO_MEMORY not in str(failure) or not self._memory_space.release():
                raise
            self._session.run_with_iobinding(binding)

    def _failed(self, failure: Exception) -> BackendError | MemoryLimitError:
        detail = session.reason(failure)
        if _NO_MEMORY in str(failure):
            return MemoryLimitError(
                f"{self._memory_space.name} has no memory left for {self._what} ({detail}); use a "
                f"smaller batch."
            )
        return BackendError(f"ONNX Runtime failed in {self._what}: {detail}")


@cache
def _load_libraries() -> None:
    """Load the CUDA libraries from their Python packages, which the linker does not search."""
    ort.preload_dlls()
    # ONNX Runtime 1.31 warns at each session that its provider is not a plugin. Errors remain.
    ort.set_default_logger_severity(_ERRORS)


def _provider_options(memory_space: MemorySpace) -> dict[str, str]:
    return {
        "device_id": str(memory_space.index),
        "user_compute_stream": str(memory_space.stream),
        "use_tf32": str(int(memory_space.tf32)),
        # The default tries all algorithms for each new shape, and its choice may vary.
        "cudnn_conv_algo_search": "HEURISTIC",
        # The default grows by powers of two and may take twice the memory.
        "arena_extend_strategy": "kSameAsRequested",
    }


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
