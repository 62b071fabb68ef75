"""Defines ``OnnxModel``, which evaluates and differentiates an ONNX model.

Two kinds of session run the graph. The *forward* session reads data and parameters and returns
outputs, activations and the tensors of the backward pass. A *backward* session reads these tensors
and cotangents and returns gradients; there is one for each pair of differentiated values and
independent variables. Several backward passes use one forward pass. Parameters are inputs of the
sessions, so new parameter values need no new session.
"""

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property

import numpy as np

from kfac_engine._types import Array
from kfac_engine.arguments import MOST_THREADS, check_int, check_patterns
from kfac_engine.autodiff.activity import left_out
from kfac_engine.autodiff.canonicalize.linear_products import plain_products
from kfac_engine.autodiff.canonicalize.weights import fold_weight_operands
from kfac_engine.autodiff.differentiate import Backward, differentiate
from kfac_engine.autodiff.second_order import differentiate_twice, joint_graph
from kfac_engine.autodiff.training_form import (
    drawn_values,
    joined_statistics,
    with_running_statistics,
)
from kfac_engine.backend.memory_space import HOST, MemorySpace
from kfac_engine.backend.namespace import array_module
from kfac_engine.errors import BackendError
from kfac_engine.graph.analysis.exporter_changes import find_ties, merge_ties, spread, tied
from kfac_engine.graph.analysis.subgraph import SubGraph, of_constants
from kfac_engine.graph.analysis.trainable import trainable_parameters
from kfac_engine.graph.load import LoadedModel, ModelSource, load_model as load
from kfac_engine.graph.passes.embedding_bags import without_bag_loops
from kfac_engine.graph.passes.upcast import GradientDType, in_types, result_types
from kfac_engine.graph.structure import Fact, Graph, Node
from kfac_engine.runtime.context import SessionContext
from kfac_engine.runtime.cpu.graph_passes import chosen_passes
from kfac_engine.runtime.draws import Passes, start_name
from kfac_engine.runtime.inputs import check_inputs, check_parameters, not_finite, require_agreement
from kfac_engine.runtime.lower import lowered, with_taken_branches
from kfac_engine.runtime.model_sessions import BackwardSession, open_backward, open_forward
from kfac_engine.runtime.sample_run import measured_facts, sample_facts
from kfac_engine.runtime.trace import Trace
from kfac_engine.sessions.device_session import DeviceSession
from kfac_engine.sessions.session import Session
from kfac_engine.system.memory_limits import require_memory, spelled

# Largest number of twice differentiated graphs, one for each batch shape; the oldest are removed.
_MOST_SHAPES = 8


class _Constants(Mapping[str, Array]):
    """Constants of a graph, with the present values of ``parameters`` among them.

    ``read`` returns a parameter as an array of the host.
    """

    def __init__(
        self,
        constants: Mapping[str, Array],
        parameters: Mapping[str, Array],
        read: Callable[[Array], Array],
    ) -> None:
        self._fixed = {name: None if name in parameters else a for name, a in constants.items()}
        self._parameters, self._read = parameters, read

    def __getitem__(self, name: str) -> Array:
        array = self._fixed[name]
        return self._read(self._parameters[name]) if array is None else array

    def __contains__(self, name: object) -> bool:
        return name in self._fixed

    def __iter__(self) -> Iterator[str]:
        return iter(self._fixed)

    def __len__(self) -> int:
        return len(self._fixed)


def _require_room(parameters: Mapping[str, Array]) -> None:
    """Refuse parameters whose gradients do not fit into the free memory."""
    largest = max(parameters, key=lambda name: parameters[name].nbytes)
    require_memory(
        sum(array.nbytes for array in parameters.values()),
        f"the gradient of {sum(array.size for array in parameters.values()):,} trained numbers",
        f"train fewer parameters: freeze={largest!r} saves "
        f"{spelled(parameters[largest].nbytes)}, and trainable=[…] names those to train",
    )


class OnnxModel:
    """A canonical graph with its parameters and sessions.

    Args:
        loaded: Result of ``graph.load``.
        trainable: Patterns of parameter names; None for the constants that the graph uses like
            parameters.
        freeze: Patterns of names that are not trained.
        threads: Number of threads of ONNX Runtime; 0 for its default.
        sample_inputs: A batch for the sample run; None generates one from the declared shapes.
        gradient_dtype: Element type that ``to_file_layout`` returns for float16 and bfloat16
            parameters, which are float32 in the graph: ``"file"`` for the type in the file, or
            ``"float32"``.
        tie_weights: Whether weights that are equal in the file are one parameter.
        graph_passes: Names from ``passes.PASSES``; None for all of them.

    Attributes:
        graph: The canonical graph, in operators that have derivative rules.
        memory_space: Memory space that the model runs in, which ``move`` changes.
        left_out: Map from each parameter that ``leave_out`` excluded to the reason.
        parameters: Map from each parameter to its value, which only ``set_parameters`` may change.
        ties: Weights that are copies of parameters; ``to_file_layout`` includes them.
        buffers: Map from each running statistic of a normalization to its value.
        facts: Element type and shape of every value in the sample run.
        draws: Names of values that each forward pass draws at random.
        passes: Counts the passes that ``run`` has drawn random numbers for.
        defined: Names of values that ``define`` added to the graph.

    Raises:
        ModelError: The model has no trainable parameter, or cannot run on generated inputs.
        InputError: ``gradient_dtype`` or ``graph_passes`` is wrong.
        UnknownNameError: A pattern or a pass is unknown.
        BackendError: ONNX Runtime cannot run the model.
        MemoryLimitError: The gradients of the parameters do not fit into the free memory.
    """

    def __init__(  # noqa: PLR0913 (every choice a user has, each with a default)
        self,
        loaded: LoadedModel,
        *,
        trainable: Sequence[str] | None = None,
        freeze: Sequence[str] | None = None,
        threads: int = 0,
        sample_inputs: Mapping[str, Array] | None = None,
        gradient_dtype: GradientDType = "file",
        tie_weights: bool = False,
        graph_passes: Sequence[str] | None = None,
    ) -> None:
        loaded = with_taken_branches(loaded, sample_inputs)
        self.loaded = loaded = replace(loaded, graph=without_bag_loops(loaded.graph))
        self.threads = threads
        self.memory_space, self.graph_passes = HOST, chosen_passes(graph_passes)
        # The arrays of the file are read-only. A copy would double the memory of a large model.
        self.parameters: dict[str, Array] = {
            name: loaded.graph.constants[name]
            for name in trainable_parameters(loaded.graph, trainable, freeze)
        }
        _require_room(self.parameters)
        self._by_default = trainable is None
        self.left_out: dict[str, str] = {}
        self.ties = find_ties(self.parameters, self.parameters) if tie_weights else ()
        for tie in self.ties:
            del self.parameters[tie.copy]
        self.result_types = result_types(loaded.stored, gradient_dtype)
        graph = tied(loaded.graph, self.ties) if self.ties else loaded.graph
        graph, self.new_buffers = with_running_statistics(graph)
        self.buffers = {name: graph.constants[name] for name in self.new_buffers}
        self._stored = ChainMap(self.parameters, self.buffers)
        graph, facts = lowered(graph, self.parameters, sample_inputs)
        names = self.parameters.keys()
        self.graph = plain_products(fold_weight_operands(graph, names), facts, names)
        self.facts = sample_facts(self.graph, sample_inputs) if self.graph is not graph else facts
        self.draws = drawn_values(self.graph)
        self.passes, self._start = Passes(), start_name(self.graph) if self.draws else ""
        self._wanted: dict[str, None] = dict.fromkeys(self.new_buffers.values())
        self._forward: Session | DeviceSession | None = None
        self.defined: set[str] = set()
        self._appended: dict[str, Node] = {}
        self._appended_constants: dict[str, Array] = {}
        self._backwards: dict[tuple[object, ...], Backward] = {}
        self._twices: dict[tuple[object, ...], Backward] = {}
        self._sessions: dict[int, BackwardSession] = {}
        self._fed: dict[int, tuple[str, ...]] = {}

    def __repr__(self) -> str:
        return f"<OnnxModel {self.loaded.graph.name!r:.80}: {len(self.parameters):,} parameters>"

    def leave_out(self, outputs: Sequence[str]) -> None:
        """Exclude parameters without gradient because of rounding, unless the user named them."""
        if self._by_default:
            self.left_out = left_out(self.graph, self.facts, outputs, tuple(self.parameters))
            for name in self.left_out:
                del self.parameters[name]

    def free_initial_values(self) -> None:
        """Read trained constants from ``parameters``, so that values before a step are freed.

        Later changes of the graph come before this call.
        """

        def live(graph: Graph) -> Graph:
            return replace(
                graph, constants=_Constants(graph.constants, self.parameters, self._host)
            )

        self.graph = live(self.graph)
        self.loaded = replace(self.loaded, graph=live(self.loaded.graph))

    def move(self, memory_space: MemorySpace) -> None:
        """Move parameters and buffers to a memory space, in which later traces compute."""
        self.memory_space, self._forward = memory_space, None
        self._sessions.clear()
        for arrays in self.parameters, self.buffers:
            arrays.update({name: memory_space.as_feed(array) for name, array in arrays.items()})

    def run(
        self,
        inputs: Mapping[str, Array],
        targets: Array | Mapping[str, Array] | None = None,
        parameters: Mapping[str, Array] | None = None,
    ) -> Trace:
        """Return a trace: an evaluation of the model on a batch.

        Args:
            inputs: Arrays by input name.
            targets: An array, which has the name ``"targets"`` in the trace, or a map from names to
                arrays.
            parameters: Map from a parameter to a value that replaces the current value in this
                evaluation.

        Returns:
            A trace, from which values of the graph and derivatives can be read.

        Raises:
            InputError: An input is missing or of the wrong element type.
            UnknownNameError: A name is not an input of the model.
            ShapeError: An input does not fit its declared shape, or inputs do not fit each other.
        """
        checked = check_inputs(self.graph, inputs)
        feeds = dict(zip(checked, map(self.memory_space.as_feed, checked.values()), strict=True))
        feeds |= self.parameters
        feeds |= self.buffers
        if parameters is not None:
            feeds |= self._checked(parameters)
        if self.draws:
            feeds[self._start] = self.memory_space.as_feed(self.passes.next())
        named = targets if isinstance(targets, dict | Mapping) else {"targets": targets}
        # Losses check targets of the host there.
        extra = {
            name: (HOST if isinstance(a, np.ndarray) else self.memory_space).to_device(a)
            for name, a in named.items()
            if a is not None
        }
        try:
            return Trace(self, feeds, extra, not_finite(checked))
        except BackendError as failure:
            require_agreement(self.graph, checked, failure)
            raise

    def set_parameters(self, values: Mapping[str, Array], *, copy: bool = True) -> None:
        """Replace the values of parameters, or none of them if an error is raised.

        Args:
            values: Map from a parameter to its new value, in the shape of the parameter.
            copy: Whether the values are copied; otherwise the model stores the arrays if it can.

        Raises:
            UnknownNameError: A name is not a trainable parameter.
            InputError: A parameter and a weight that is tied to it have different values.
            ShapeError: A value has another shape than the parameter.
            NonFiniteError: A value contains NaN or infinity.
        """
        self.parameters.update(self._checked(values, copy))

    def buffers_after(self, trace: Trace) -> dict[str, Array]:
        """Return copies of the running statistics after a batch, by name."""
        return {old: trace[new].copy() for old, new in self.new_buffers.items()}

    def joined_buffers(self, parts: Sequence[tuple[int, Mapping[str, Array]]]) -> dict[str, Array]:
        """Return the running statistics after a batch in parts; see ``joined_statistics``.

        ``parts`` has each part's number of examples and the running statistics after it.
        """
        if not self.buffers or len(parts) < 2:
            return dict(parts[0][1]) if parts else {}
        counts, after = zip(*parts, strict=True)
        xp = array_module(next(iter(self.buffers.values())))
        stacks = {name: xp.stack([arrays[name] for arrays in after]) for name in after[0]}
        return joined_statistics(self.loaded.graph, xp.asarray(counts), stacks)

    def to_file_layout(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return parameters or gradients in the element types and with the names of the file.

        Args:
            values: Arrays by parameter name.

        Returns:
            Map from names to arrays; the array of tied weights is under each of their names.

        Raises:
            NonFiniteError: A number is too large for the type in the file.
        """
        return in_types(spread(self.ties, values) if self.ties else values, self.result_types)

    def static_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a value that depends only on constants; None for other values."""
        return self.facts[name].shape if self._is_static(name) else None

    def subgraph(self, ends: Iterable[str] | None = None) -> SubGraph:
        """Return the part of the graph that given values depend on; by default all values."""
        return SubGraph(self.graph, self.graph.values() if ends is None else ends)

    def fetched(self) -> frozenset[str]:
        """Return the names of the values that every forward pass returns."""
        return frozenset(name for name in self._wanted if self._is_computed(name))

    def backwards(self) -> tuple[Backward, ...]:
        """Return all backward graphs that ``backward`` has returned."""
        return tuple(self._backwards.values())

    def extended_graph(self) -> Graph:
        """Return the graph with the values that ``define`` and backward graphs added."""
        nodes = (*self.graph.nodes, *self._appended.values())
        constants = {**self.graph.constants, **self._appended_constants}
        return replace(self.graph, nodes=nodes, constants=constants)

    def want(self, names: Sequence[str]) -> None:
        """Add values to the results of later forward passes."""
        missing = [name for name in names if name not in self._wanted]
        if missing:
            self._wanted.update(dict.fromkeys(missing))
            self._forward = None

    def define(self, node: Node, constants: Mapping[str, Array], like: str | Fact) -> None:
        """Add a value to the graph, which later traces can read.

        Args:
            node: Node whose first result is the value; it reads values of the graph.
            constants: Further operands of the node, by name.
            like: Element type and shape of the value, or the name of a value that has them.
        """
        self._appended[node.name] = node
        self._appended_constants |= constants
        self.facts[node.outputs[0]] = self.facts[like] if isinstance(like, str) else like
        self.defined.add(node.outputs[0])

    def extend(
        self, nodes: Sequence[Node], facts: Mapping[str, Fact], constants: Mapping[str, Array]
    ) -> None:
        """Append nodes to the graph, before the first differentiation.

        Args:
            nodes: Nodes in topological order.
            facts: Element type and shape of their results, and of ``constants``.
            constants: Constants that the nodes read, by name.
        """
        merged = {**self.graph.constants, **constants}
        self.graph = replace(self.graph, nodes=(*self.graph.nodes, *nodes), constants=merged)
        self.facts = {**self.facts, **facts}

    def fetch(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return the results of a forward pass by name.

        Args:
            feeds: Checked inputs and parameters, and the start of random numbers, by name.

        Returns:
            Map from names to arrays.
        """
        wanted = tuple(self._wanted)
        return self._forward_session().run(wanted, feeds) if wanted else {}

    def inference_feeds(self) -> dict[str, Array]:
        """Return parameters, buffers and random numbers, which a pass in inference form reads.

        The random numbers are the same in every pass.
        """
        feeds = {**self.parameters, **self.buffers}
        if self.draws:
            feeds[self._start] = self.memory_space.as_feed(self.passes.inference())
        return feeds

    def backward(
        self, outputs: Sequence[str], wrt: Sequence[str], *, independent: bool = False
    ) -> Backward:
        """Return the backward graph from ``outputs`` to ``wrt``; forward passes save its inputs.

        Args:
            outputs: Values to differentiate.
            wrt: Values with respect to which the outputs are differentiated.
            independent: Whether the values in ``wrt`` are independent variables.

        Returns:
            The graph, the same object for equal arguments.
        """
        key = (tuple(outputs), tuple(wrt), independent)
        if key not in self._backwards:
            self._backwards[key] = backward = differentiate(
                self.graph, self.facts, outputs, wrt, independent=independent
            )
            self._adopt(backward)
        return self._backwards[key]

    def twice(
        self, backward: Backward, feeds: Mapping[str, Array], wrt: Sequence[str] = ()
    ) -> Backward:
        """Return the backward graph of a backward graph, for the shapes of one batch.

        Args:
            backward: Result of ``self.backward``.
            feeds: Inputs and parameters of a batch, and cotangents; only their shapes are used.
            wrt: Names of independent variables for second derivatives.

        Returns:
            The graph, the same object for equal arguments and shapes.
        """
        key = (id(backward), tuple(wrt), *(array.shape for array in feeds.values()))
        if key not in self._twices:
            joint = joint_graph(self.graph, backward)
            facts = measured_facts(
                joint, {n: self.memory_space.on_host(a) for n, a in feeds.items()}
            )
            while len(self._twices) >= _MOST_SHAPES:
                oldest = self._twices.pop(next(iter(self._twices)))
                self._sessions.pop(id(oldest), None)
                self._fed.pop(id(oldest), None)
            self._twices[key] = second = differentiate_twice(self.graph, backward, facts, wrt)
            self._adopt(second)
        return self._twices[key]

    def context(self) -> SessionContext:
        """Return the graph with the settings of its sessions."""
        return SessionContext(
            self.graph, self.facts, self.parameters.keys(), self._stored, self._is_static,
            self._frozen, self.memory_space, self.threads, self.graph_passes,
            self._start,
        )  # fmt: skip

    def fed(self, backward: Backward) -> tuple[str, ...]:
        """Return the inputs of a backward session, except cotangents and constants."""
        if id(backward) not in self._fed:
            self._fed[id(backward)] = self.context().fed(backward)
        return self._fed[id(backward)]

    def backward_session(self, backward: Backward) -> BackwardSession:
        """Return the session of a backward graph; the first call builds it."""
        if id(backward) not in self._sessions:
            fetched = self._forward_session().output_dtypes if self._wanted else {}
            self._sessions[id(backward)] = open_backward(self.context(), backward, fetched)
        return self._sessions[id(backward)]

    # -- private ----------------------------------------------------------------------------------

    def _is_static(self, name: str) -> bool:
        return name in self.graph.constants or name in self._computed_from_constants

    @property
    def _frozen(self) -> Set[str]:
        return self.graph.constants.keys() - self._stored.keys()

    @cached_property
    def _computed_from_constants(self) -> frozenset[str]:
        return of_constants(self.graph)

    def _adopt(self, backward: Backward) -> None:
        """Add the values that a backward graph reads to the results of forward passes."""
        self._appended |= {node.name: node for node in backward.forward_nodes}
        self._appended_constants |= backward.constants
        self.want([name for name in self.fed(backward) if self._is_computed(name)])

    def _host(self, array: Array) -> Array:
        return self.memory_space.on_host(array)

    def _is_computed(self, name: str) -> bool:
        inputs = {entry.name for entry in self.graph.inputs}
        return name not in inputs and name not in self._stored

    def _checked(self, values: Mapping[str, Array], copy: bool = True) -> dict[str, Array]:
        new, space = merge_ties(self.ties, values), self.memory_space
        return check_parameters(self.graph.name, self.parameters, new, space, copy=copy)

    def _forward_session(self) -> Session | DeviceSession:
        if self._forward is None:
            self._forward = open_forward(self.context(), self.extended_graph(), tuple(self._wanted))
        return self._forward


def load_model(
    source: ModelSource,
    *,
    trainable: str | Sequence[str] | None = None,
    freeze: str | Sequence[str] | None = None,
    threads: int | None = None,
    sample_inputs: Mapping[str, Array] | None = None,
) -> OnnxModel:
    """Return a model that can be evaluated and differentiated.

    Args:
        source: Path, bytes or ``ModelProto``.
        trainable: Pattern or patterns of parameter names; None for the constants that the graph
            uses like parameters.
        freeze: Pattern or patterns of names that are not trained.
        threads: Number of threads of ONNX Runtime; None for its default.
        sample_inputs: A batch for the sample run, as a map from input to array; needed if the model
            does not run on generated inputs.

    Returns:
        The model; ``model.run(inputs)`` returns a trace.

    Raises:
        InputError: The file or an argument is wrong.
        UnknownNameError: A pattern matches no floating-point constant.
        ModelError: The model has no parameter to train.
    """
    check_patterns("trainable", trainable)
    check_patterns("freeze", freeze)
    if threads is not None:
        check_int("threads", threads, least=0, most=MOST_THREADS)
    return OnnxModel(
        load(source),
        trainable=trainable,
        freeze=freeze,
        threads=threads or 0,
        sample_inputs=sample_inputs,
    )
