"""Sessions that compute on a device: inputs are bound to where they lie, results stay there.

As ``runtime``, this file knows ONNX Runtime. Small integers, which are counts and sides, stay on
the host: operators read them there, and ONNX Runtime would bring each back by itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnxruntime as ort

from kfac_engine._types import Array, DType
from kfac_engine.backend.memory_space import HOST, MemorySpace, stays_on_host
from kfac_engine.errors import BackendError, MemoryLimitError
from kfac_engine.graph.compact import CompactModel
from kfac_engine.sessions import session

# Device type to the provider that computes on it; the CPU provider runs operators that it lacks.
_PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}
_NO_WAITING = "disable_synchronize_execution_providers"
_NO_MEMORY = "Failed to allocate memory"


def has_provider(kind: str) -> bool:
    """Whether the ONNX Runtime that is installed was built for devices of a kind."""
    return _PROVIDERS[kind] in ort.get_available_providers()


class DeviceSession:
    """A graph compiled for a memory space; otherwise as ``session.Session``.

    Args:
        model: The message, and constants that it leaves out.
        threads: Threads inside an operator that runs on the CPU; 0 leaves the choice to ONNX
            Runtime.
        optimize: Whether graph optimizations run.
        what: What the graph is, for messages.
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
        provider = _PROVIDERS[memory_space.kind]
        if memory_space.kind == "cuda":
            _load_libraries()
        # Without the second one ONNX Runtime would fall back to the CPU as well.
        providers = [
            (provider, _provider_options(memory_space)),
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
                f"ONNX Runtime {ort.__version__} cannot load its {provider}, for the reason that "
                f"it printed"
            )
        self.output_dtypes: dict[str, DType] = session.array_types(self._session)
        self._hosted = frozenset(self._left_to_the_host())

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Evaluate ``outputs``.

        Args:
            outputs: Names of graph outputs.
            feeds: One array for each graph input, in the memory space or on the host.

        Returns:
            Name to an array in the memory space; on the host for small integers.

        Raises:
            BackendError: An operator failed, usually because the sizes of the feeds do not fit.
            MemoryLimitError: The device has not enough memory left.
        """
        if any(array.dtype.kind not in "biuf" for array in feeds.values()):
            return self._run_on_copies(outputs, feeds)
        return self.run_into({}, feeds, outputs)

    def run_into(
        self,
        results: Mapping[str, Array],
        feeds: Mapping[str, Array],
        others: Sequence[str] = (),
    ) -> dict[str, Array]:
        """Evaluate outputs into arrays of the caller's own: no copy follows.

        Args:
            results: Name of a graph output to an array of the memory space, of the
                output's shape and element type.
            feeds: One array for each graph input, in the memory space or on the host.
            others: Further outputs.

        Returns:
            For ``others``, name to an array in the memory space; on the host for small integers.

        Raises:
            BackendError: An operator failed, or a result has another shape than its array.
            MemoryLimitError: The device has not enough memory left.
        """
        # Feeds of the host are copied when they are bound: into memory that may still be read.
        with self._memory_space.ordered():
            binding = self._bound(feeds)
            for name, array in results.items():
                binding.bind_output(name, *self._where(array))
            for name in others:
                seat = self._memory_space_of(name)
                binding.bind_output(name, seat.kind, seat.index)
            self._evaluate(binding, (*results, *others))
        found = dict(zip(others, binding.get_outputs()[len(results) :], strict=True))
        for name, value in found.items():
            if not value.has_value():
                raise BackendError(f"ONNX Runtime left out '{name}' in {self._what}.")
        return {
            name: self._memory_space_of(name).adopt(value, self.output_dtypes[name])
            for name, value in found.items()
        }

    # -- private ----------------------------------------------------------------------------------

    def _left_to_the_host(self) -> Iterable[str]:
        """Results that are counts or sides; where the rank is not known, it is taken for small."""
        for output in self._session.get_outputs():
            dtype = self.output_dtypes.get(output.name)
            if dtype is not None and stays_on_host(dtype, len(output.shape or ())):
                yield output.name

    def _memory_space_of(self, name: str) -> MemorySpace:
        return HOST if name in self._hosted else self._memory_space

    def _where(self, array: Array) -> tuple[str, int, DType, tuple[int, ...], int]:
        """Device, its number, element type, shape and address of an array."""
        seat = HOST if isinstance(array, np.ndarray) else self._memory_space
        return seat.kind, seat.index, array.dtype, array.shape, seat.address(array)

    def _bound(self, feeds: Mapping[str, Array]) -> Any:
        """A binding of the feeds, which must live until it was run."""
        binding = self._session.io_binding()
        given = {**feeds, **self._fed}
        # Nothing is read of an empty array, which has no address on a device.
        on_host = {
            name: array if isinstance(array, np.ndarray) else np.empty(array.shape, array.dtype)
            for name, array in given.items()
            if isinstance(array, np.ndarray) or not array.size
        }
        try:
            for name, value in session.host_values(on_host).items():
                binding.bind_ortvalue_input(name, value)
            for name in given.keys() - on_host.keys():
                binding.bind_input(name, *self._where(given[name]))
        except (RuntimeError, ValueError) as failure:  # all that binding raises
            raise self._failed(failure) from failure
        return binding

    def _run_on_copies(
        self, outputs: Sequence[str], feeds: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Text cannot be bound."""
        given = {
            name: self._memory_space.on_host(array)
            for name, array in {**feeds, **self._fed}.items()
        }
        try:
            results = self._session.run(list(outputs), given)
        except session.FAILURES as failure:
            raise self._failed(failure) from failure
        return {
            name: self._memory_space_of(name).as_feed(array)
            for name, array in zip(outputs, results, strict=True)
        }

    def _evaluate(self, binding: Any, outputs: Iterable[str]) -> None:
        options = ort.RunOptions()
        if self._hosted.isdisjoint(outputs):
            # What follows is ordered on the device: the host need not wait.
            options.add_run_config_entry(_NO_WAITING, "1")
        try:
            self._attempt(binding, options)
        except RuntimeError as failure:  # all that bound runs raise
            raise self._failed(failure) from failure

    def _attempt(self, binding: Any, options: ort.RunOptions) -> None:
        try:
            self._session.run_with_iobinding(binding, options)
        except RuntimeError as failure:
            if _NO_MEMORY not in str(failure) or not self._memory_space.release():
                raise
            self._session.run_with_iobinding(binding, options)

    def _failed(self, failure: Exception) -> BackendError | MemoryLimitError:
        why = session.reason(failure)
        if _NO_MEMORY in str(failure):
            return MemoryLimitError(
                f"{self._memory_space.name} has no memory left for {self._what} ({why}); "
                f"take a smaller batch."
            )
        return BackendError(f"ONNX Runtime failed in {self._what}: {why}")


@cache
def _load_libraries() -> None:
    """Load CUDA's libraries from the packages that brought them, where no linker looks."""
    ort.preload_dlls()


def _provider_options(memory_space: MemorySpace) -> dict[str, str]:
    if memory_space.kind == "cpu":
        return {}
    return {
        "device_id": str(memory_space.index),
        "user_compute_stream": str(memory_space.stream),
        "use_tf32": str(int(memory_space.tf32)),
        # Trying all algorithms for each new shape, the default, may choose another every time.
        "cudnn_conv_algo_search": "HEURISTIC",
        # By powers of two, the default, it would take up to twice of what it needs.
        "arena_extend_strategy": "kSameAsRequested",
    }
