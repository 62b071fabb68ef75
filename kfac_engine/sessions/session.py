"""Runs sessions on the CPU. Only modules of this package import ONNX Runtime.

Inputs and large results are not copied: an ``OrtValue`` wraps the memory of a NumPy array, and a
result is a read-only view through DLPack. Small results are copied, which takes a quarter of the
time of a binding.

All sessions of a process allocate from one arena, so a backward pass uses the memory that a forward
pass has released. A step of a transformer then needs 460 MB instead of 820 MB.
"""

import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from operator import attrgetter
from typing import NoReturn, TypeVar

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from kfac_engine._types import Array, DType
from kfac_engine.errors import (
    BackendError,
    KfacError,
    MissingKernelError,
    ModelError,
    UnsupportedError,
)
from kfac_engine.graph.structure import Input, Node
from kfac_engine.graph.write import CompactModel, compact_model
from kfac_engine.system.memory_limits import require_room_for_threads

# Time limit of a sample run in seconds, because a loop may not terminate.
MOST_SECONDS = 600

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
# Exceptions of ONNX Runtime, and built-in exceptions to which it converts C++ exceptions.
FAILURES: tuple[type[Exception], ...] = (
    *(kind for kind in vars(ort_errors).values() if Exception in getattr(kind, "__bases__", ())),
    RuntimeError,
    ValueError,
)


# Largest number of feeds, and of their bytes, for a run without a binding.
_FEW, _SMALL_BYTES = 64, 1 << 19
_BYTES = attrgetter("nbytes")


class Uncopied:
    """Base of sessions; an object with a session can be neither copied in depth nor pickled."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse ``copy`` and ``pickle``, which ONNX Runtime does not support."""
        raise UnsupportedError(
            "an object with sessions of ONNX Runtime cannot be copied or pickled; make another one "
            "from the model."
        )


class Session(Uncopied):
    """A graph compiled for the CPU.

    Args:
        model: Serialized graph, and constants outside it.
        threads: Number of threads within an operator; 0 for the default of ONNX Runtime.
        optimize: Whether graph optimizations run. They cost more than they save for a single run or
            for very many nodes.
        once: Whether the session runs a few times only. It then does not use the arena, and its
            runs have a time limit.
        what: Description of the graph, for messages.

    Raises:
        BackendError: ONNX Runtime refuses the graph.
        MemoryLimitError: A limit of the process leaves too little memory for threads.
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
        require_room_for_threads()
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
        # The only strong reference: clearing the list closes the session.
        self._open = [session]
        if not once:
            weakref.finalize(self, _close, self._open).atexit = False

        self._reads_text = any(entry.type not in _DTYPES for entry in session.get_inputs())
        self.output_dtypes = array_types(session.get_outputs())
        self.input_dtypes = array_types(session.get_inputs())
        self.input_shapes = {entry.name: tuple(entry.shape) for entry in session.get_inputs()}
        self.output_shapes = {output.name: tuple(output.shape) for output in session.get_outputs()}

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return the values of ``outputs`` for the arrays ``feeds``, as read-only arrays.

        ``BackendError`` is raised if an operator failed, usually because the shapes of the feeds do
        not match.
        """
        # Arrays of text cannot be bound without a copy.
        run = self._run_copied if self._reads_text else self.run_into
        return run({}, feeds, outputs)

    def run_into(
        self, results: Mapping[str, Array], feeds: Mapping[str, Array], others: Sequence[str] = ()
    ) -> dict[str, Array]:
        """Write values of outputs to arrays of the caller without a copy, and return ``others``.

        Each array in ``results`` is contiguous and has the shape and element type of its output.
        Returned arrays are read-only. ``BackendError`` is raised if an operator failed, or if a
        result has another shape than its array.
        """
        few = len(feeds) <= _FEW and not self._fed
        if few and sum(map(_BYTES, feeds.values())) <= _SMALL_BYTES:
            return self._run_copied(results, feeds, others)
        # Unlike other calls of ONNX Runtime, a binding does not compare each input with all feeds.
        binding = self._open[0].io_binding()
        for name, value in (host_values(feeds) | self._fed).items():
            binding.bind_ortvalue_input(name, value)
        for name, value in host_values(results).items():
            binding.bind_ortvalue_output(name, value)
        for name in others:
            binding.bind_output(name)
        self._done(partial(self._open[0].run_with_iobinding, binding))
        values = binding.get_outputs()[len(results) :] if others else []
        return {name: self._view(name, value) for name, value in zip(others, values, strict=True)}

    def _run_copied(
        self, results: Mapping[str, Array], feeds: Mapping[str, Array], others: Sequence[str]
    ) -> dict[str, Array]:
        """Do the work of ``run_into`` by copies, which is faster for small outputs."""
        names = [*results, *others]
        call = partial(self._open[0].run, names, {**feeds, **self._fed})
        values = dict(zip(names, self._done(call), strict=True))
        for name, array in results.items():
            if values[name].shape != array.shape:
                raise BackendError(
                    f"ONNX Runtime failed in {self._what}: '{name}' has shape "
                    f"{values[name].shape}, but its array {array.shape}."
                )
            array[...] = values[name]
        returned = dict[str, Array]()
        for name in others:
            value = returned[name] = values[name]
            if value is None:
                raise BackendError(f"ONNX Runtime returned no value for '{name}' in {self._what}.")
            value.flags.writeable = False
        return returned

    def _done(self, call: Callable[[ort.RunOptions | None], _T]) -> _T:
        """Return the result of a run; convert exceptions of ONNX Runtime."""
        try:
            return interruptible(call) if self._once else call(None)
        except KfacError:  # some of these errors are ValueErrors, which ``FAILURES`` contains
            raise
        except FAILURES as failure:
            raise BackendError(
                f"ONNX Runtime failed in {self._what}: {reason(failure)}"
            ) from failure

    def _view(self, name: str, value: ort.OrtValue) -> Array:
        """Return a view of an output; the view keeps the output alive."""
        if not value.has_value():
            raise BackendError(f"ONNX Runtime returned no value for '{name}' in {self._what}.")
        # DLPack represents truth values as bytes: the view restores their type.
        return np.from_dlpack(value).view(self.output_dtypes[name])


def run_file(
    source: str | os.PathLike[str] | bytes, feeds: Mapping[str, Array]
) -> dict[str, Array]:
    """Evaluate all outputs of a model file as it is, in a session with default options.

    ``source`` is a path, or the bytes of a file. Outputs that are not tensors are left out.
    ``BackendError`` is raised if ONNX Runtime refuses the file or the inputs, and ``ModelError`` if
    the run exceeds the time limit.
    """
    model = source if isinstance(source, bytes) else os.fspath(source)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        results = interruptible(partial(session.run, None, dict(feeds)))
    except KfacError:  # a ValueError, too
        raise
    except FAILURES as failure:
        raise BackendError(f"ONNX Runtime cannot run the file: {reason(failure)}") from failure
    named = zip((output.name for output in session.get_outputs()), results, strict=True)
    return {name: array for name, array in named if isinstance(array, np.ndarray)}


def interruptible(call: Callable[[ort.RunOptions], _T]) -> _T:
    """Return the result of a run with a time limit, which Ctrl-C interrupts.

    A loop of the model may not terminate. ``call`` runs a session with the options, in another
    thread. ``ModelError`` is raised if the run exceeds the time limit.
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
                f"a sample run did not end within {MOST_SECONDS} s; the model may have a Loop "
                f"that does not end."
            ) from None


def options_for(threads: int, *, optimize: bool = True, once: bool = False) -> ort.SessionOptions:
    """Return the options of a session; the arguments are as for ``Session``."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    # The plan of memory reuse takes quadratic time: 8.5 s instead of 0.2 s for 4800 nodes. The
    # arena reuses memory of dead results in any case; the measured peaks are equal.
    options.enable_mem_reuse = False
    # A memory pattern allocates all results of a batch size as one block, next to the pieces that
    # the first batch left in the arena: 50 % more memory, without a gain in time.
    options.enable_mem_pattern = False
    # Run nodes in the order of the graph. By default gradients of parameters are last, and all of
    # their operands stay in memory until then.
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    # Nodes that an optimizer of ONNX Runtime writes run after all nodes that are ready. The kernels
    # of a backward pass waited for fused reshapes, and all masks of the pass were computed first:
    # half more memory for a MobileNet.
    options.add_session_config_entry("optimization.disable_specified_optimizers", "ReshapeFusion")
    # Threads spin between two operators, because waking them takes 6 % of the passes of a
    # transformer. They spin for a short time only: on a busy core spinning for the default of 1 ms
    # costs 30 %. They do not spin between runs, when other sessions and the BLAS need the cores.
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    options.add_session_config_entry("session.intra_op.spin_duration_us", "50")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Fusing int8 weights with products would round the other operand to int8, too.
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
    """Create one arena for all sessions; by default each session has an arena."""
    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    # The arena grows by powers of two: pieces of the requested sizes took 10 % more memory.
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg({"arena_extend_strategy": 0}))


def _close(session: list[ort.InferenceSession]) -> None:
    """Close an unused session, and release the memory of the arena that no session uses."""
    session.clear()
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    _identity().run(None, {"x": np.zeros((), np.float32)}, options)


@cache
def _identity() -> ort.InferenceSession:
    """Return a trivial session, because an arena shrinks only at the end of a run."""
    model = compact_model(
        [Node("Identity", ("x",), ("y",))], [Input("x", np.dtype(np.float32), ())], ("y",), {}, 18
    )
    options = options_for(1)
    return ort.InferenceSession(model.proto, options, providers=["CPUExecutionProvider"])


def array_types(entries: Sequence[ort.NodeArg]) -> dict[str, DType]:
    """Return the element type of every numeric input or output."""
    return {e.name: np.dtype(_DTYPES[e.type]) for e in entries if e.type in _DTYPES}


def host_values(arrays: Mapping[str, Array]) -> dict[str, ort.OrtValue]:
    """Return views of contiguous arrays and copies of other arrays, as values of ONNX Runtime."""
    return {
        name: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array).reshape(array.shape))
        for name, array in arrays.items()
    }


def reason(failure: Exception) -> str:
    """Return the readable part of a message of ONNX Runtime on one line, with the node."""
    text = str(failure).replace("\n", " ")
    kernel = _KERNEL.search(text)
    if kernel:
        return (
            f"it has no {kernel[1]} for the CPU in the element types of node '{kernel[2]}'; "
            f"float32 has the most kernels, so export the model in float32"
        )
    text = text.removeprefix("Error in execution: ")
    detail = text.split("Status Message: ")[-1].split(" : ", 3)[-1].strip()
    node = re.search(r"while running \w+ node\. Name:'([^']+)'", text)
    return f"at node '{node[1]}': {detail}" if node else detail
