"""ONNX Runtime sessions on the CPU; with ``device_session``, the only modules that import it.

Arrays go in and come out without copies on the CPU: an ``OrtValue`` wraps the memory of a NumPy
array, and a result is viewed through DLPack (read-only, kept alive by the view).

All sessions of the process take their memory from one arena: what a forward pass no longer needs
serves the backward pass. A step of a transformer keeps 460 MB instead of 820, as fast.
"""

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import TypeVar

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from kfac_engine._types import Array, DType
from kfac_engine.errors import BackendError, KfacError, MissingKernelError, ModelError
from kfac_engine.graph.compact import CompactModel, compact_model
from kfac_engine.graph.limits import MOST_SECONDS
from kfac_engine.graph.structure import Input, Node

_T = TypeVar("_T")

_KERNEL = re.compile(r"Could not find an implementation for (\w+)\(\d+\) node with name '(.*)'")
_DTYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(bool)": "bool",
    **{
        f"tensor({kind}{bits})": f"{kind}{bits}"
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
}
# Exceptions of ONNX Runtime, and C++ exceptions that are converted to built-in ones.
FAILURES: tuple[type[Exception], ...] = (
    *(kind for kind in vars(ort_errors).values() if Exception in getattr(kind, "__bases__", ())),
    RuntimeError,
    ValueError,
)


class Session:
    """One graph compiled for the CPU.

    Args:
        model: The message, and constants that it leaves out.
        threads: Threads inside an operator; 0 leaves the choice to ONNX Runtime.
        optimize: Whether graph optimizations run; off for a single run that fetches everything, and
            where there are so many nodes that they take longer than they save.
        once: Whether it serves a few runs only: then it shares no memory, and keeps none.
        what: What the graph is, for messages.

    Raises:
        BackendError: ONNX Runtime refuses the graph.
    """

    def __init__(
        self,
        model: CompactModel,
        *,
        threads: int,
        optimize: bool = True,
        once: bool = False,
        what: str,
    ) -> None:
        options = options_for(threads, optimize=optimize, once=once)
        self._what, self._once = what, once
        self._fed = host_values(model.fed)
        copied = host_values(model.copied)
        options.add_external_initializers(list(copied), list(copied.values()))
        try:
            session = ort.InferenceSession(model.proto, options, providers=["CPUExecutionProvider"])
        except FAILURES as failure:
            kind = MissingKernelError if _KERNEL.search(str(failure)) else BackendError
            raise kind(
                f"ONNX Runtime {ort.__version__} cannot build {what}: {reason(failure)}"
            ) from failure
        # The one strong reference, so that whoever clears the list closes the session.
        self._open = [session]
        if not once:
            weakref.finalize(self, _close, self._open).atexit = False

        self.output_dtypes = array_types(session)
        self.output_shapes = {output.name: tuple(output.shape) for output in session.get_outputs()}

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Evaluate ``outputs``.

        Args:
            outputs: Names of graph outputs.
            feeds: One array for each graph input.

        Returns:
            Name to a read-only array.

        Raises:
            BackendError: An operator failed, usually because the sizes of the feeds do not fit.
        """
        if all(array.dtype.kind in "biuf" for array in feeds.values()):
            return self.run_into({}, feeds, outputs)
        # Arrays of text cannot be bound without a copy.
        call = partial(self._session.run, list(outputs), {**feeds, **self._fed})
        return dict(zip(outputs, self._done(call), strict=True))

    def run_into(
        self,
        results: Mapping[str, Array],
        feeds: Mapping[str, Array],
        others: Sequence[str] = (),
    ) -> dict[str, Array]:
        """Evaluate outputs into arrays of the caller's own: no copy follows.

        Args:
            results: Name of a graph output to a contiguous array of its shape and element type.
            feeds: One array for each graph input, of numbers or truth values.
            others: Further outputs.

        Returns:
            Name to a read-only array, for ``others``.

        Raises:
            BackendError: An operator failed, or a result has another shape than its array.
        """
        # Other ways to run compare each input with all feeds.
        binding = self._session.io_binding()
        for name, value in (host_values(feeds) | self._fed).items():
            binding.bind_ortvalue_input(name, value)
        for name, value in host_values(results).items():
            binding.bind_ortvalue_output(name, value)
        for name in others:
            binding.bind_output(name)
        self._done(partial(self._session.run_with_iobinding, binding))
        found = binding.get_outputs()[len(results) :] if others else []
        return {name: self._view(name, value) for name, value in zip(others, found, strict=True)}

    @property
    def _session(self) -> ort.InferenceSession:
        return self._open[0]

    def _done(self, call: Callable[[ort.RunOptions | None], _T]) -> _T:
        """The result of a run."""
        try:
            return interruptible(call) if self._once else call(None)
        except KfacError:  # a ValueError, too
            raise
        except FAILURES as failure:
            raise BackendError(
                f"ONNX Runtime failed in {self._what}: {reason(failure)}"
            ) from failure

    def _view(self, name: str, value: ort.OrtValue) -> Array:
        """An output where it lies; the array keeps it alive."""
        if not value.has_value():
            raise BackendError(f"ONNX Runtime left out '{name}' in {self._what}.")
        # DLPack shows truth values as bytes: the view gives them their type back.
        return np.from_dlpack(value).view(self.output_dtypes[name])


def interruptible(call: Callable[[ort.RunOptions], _T]) -> _T:
    """The result of a run with a time limit that Ctrl-C can end: a loop may not terminate.

    Args:
        call: Runs a session with these options.

    Returns:
        What ``call`` returns; another thread calls it.

    Raises:
        ModelError: The run took too long.
    """
    options = ort.RunOptions()
    with ThreadPoolExecutor(1) as other:
        result = other.submit(call, options)
        try:
            return result.result(MOST_SECONDS)
        except BaseException as failure:
            options.terminate = True
            if not isinstance(failure, TimeoutError):
                raise
            raise ModelError(
                f"a sample run did not end within {MOST_SECONDS} s; the model may hold a Loop "
                f"without an end."
            ) from None


def options_for(threads: int, *, optimize: bool = True, once: bool = False) -> ort.SessionOptions:
    """What every session is made with; the arguments are those of ``Session``."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    # Planning which result may take the memory of which other is quadratic in their number:
    # 8.5 s instead of 0.2 s for 4800 nodes. Memory of dead results is used again all the same:
    # equal peaks were measured.
    options.enable_mem_reuse = False
    # A plan lays all results of a batch size into one block, beside the pieces that the first such
    # batch left in the arena: half as much memory again, and no time was saved.
    options.enable_mem_pattern = False
    # In the order of our graphs, which a backward pass has in mind: by default gradients of
    # parameters come last, and everything that they are made of is kept until then.
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    # Threads that sleep between two operators are slow to wake: 6 % of the passes of a transformer,
    # with two of them. So they wait for the next one awake, but no longer than operators lie apart
    # (on a core that others use, 12 % is lost that way, 30 % with the 1 ms of the default), and
    # never between runs, where they would take the cores of the other session and of the BLAS.
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    options.add_session_config_entry("session.intra_op.spin_duration_us", "50")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Fused with products, int8 weights have their operands rounded to int8 as well.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if once:
        options.enable_cpu_mem_arena = False
    else:
        _share_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")
    return options


@cache
def _share_arena() -> None:
    """Make the arena for all sessions; each has one of its own otherwise."""
    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    # It grows by powers of two: with pieces as large as requested, 10 % more was held.
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg({"arena_extend_strategy": 0}))


def _close(session: list[ort.InferenceSession]) -> None:
    """Close a session that nobody uses, and return what it leaves unused of the arena."""
    session.clear()
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    _identity().run(None, {"x": np.zeros((), np.float32)}, options)


@cache
def _identity() -> ort.InferenceSession:
    """A session that does next to nothing: only at the end of a run does an arena shrink."""
    model = compact_model(
        [Node("Identity", ("x",), ("y",))], [Input("x", np.dtype(np.float32), ())], ("y",), {}, 18
    )
    options = options_for(1)
    return ort.InferenceSession(model.proto, options, providers=["CPUExecutionProvider"])


def array_types(session: ort.InferenceSession) -> dict[str, DType]:
    """Element type of every graph output that is an array of numbers."""
    return {
        output.name: np.dtype(_DTYPES[output.type])
        for output in session.get_outputs()
        if output.type in _DTYPES
    }


def host_values(arrays: Mapping[str, Array]) -> dict[str, ort.OrtValue]:
    """Views of the arrays, which they keep alive; copies of those that are not contiguous."""
    return {
        name: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array).reshape(array.shape))
        for name, array in arrays.items()
    }


def reason(failure: Exception) -> str:
    """The readable part of ONNX Runtime's message, on one line, and which node it speaks of."""
    text = str(failure).replace("\n", " ")
    kernel = _KERNEL.search(text)
    if kernel:
        return (
            f"it has no {kernel[1]} for the CPU in the element types of node '{kernel[2]}'; "
            f"float32 has the most kernels, so export the model in float32"
        )
    text = text.removeprefix("Error in execution: ")
    said = text.split("Status Message: ")[-1].split(" : ", 3)[-1].strip()
    node = re.search(r"while running \w+ node\. Name:'([^']+)'", text)
    return f"at node '{node[1]}': {said}" if node else said
