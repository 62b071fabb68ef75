"""An ONNX model that can be evaluated and differentiated.

Two kinds of session run the graph. The *forward* session takes data and parameters and returns
whatever is asked for: outputs, activations, tensors that a backward pass needs. A *backward*
session, one for each pair (values differentiated, values asked for), takes those tensors and a
cotangent and returns gradients. Several backward passes share one forward pass, and new parameter
values need no new session because parameters are fed like data.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property

from kfac_engine._types import Array
from kfac_engine.autodiff.activity import left_out
from kfac_engine.autodiff.canonicalize.linear_products import plain_products
from kfac_engine.autodiff.canonicalize.weight_operands import fold_weight_operands
from kfac_engine.autodiff.differentiate import Backward, differentiate
from kfac_engine.autodiff.random_ops import drawn_values
from kfac_engine.autodiff.running_statistics import with_running_statistics
from kfac_engine.autodiff.second_order import differentiate_twice, joint_graph
from kfac_engine.backend.cpu.backend import SCRATCH_BYTES
from kfac_engine.backend.memory_space import HOST, MemorySpace
from kfac_engine.graph.analysis.subgraph import of_constants
from kfac_engine.graph.analysis.ties import find_ties, gathered, spread, tied
from kfac_engine.graph.analysis.trainable import trainable_parameters
from kfac_engine.graph.load import LoadedModel
from kfac_engine.graph.passes.upcast import GradientDType, handed_out_types, in_types
from kfac_engine.graph.structure import Fact, Graph, Node
from kfac_engine.runtime.backward_session import BackwardSession, open_backward
from kfac_engine.runtime.context import SessionContext
from kfac_engine.runtime.cpu.passes import chosen_passes
from kfac_engine.runtime.forward_session import open_forward
from kfac_engine.runtime.inputs import check_inputs, check_parameters, explained
from kfac_engine.runtime.lower import lowered, with_taken_branches
from kfac_engine.runtime.sample_run import measured_facts, sample_facts
from kfac_engine.runtime.trace import Trace
from kfac_engine.sessions.device_session import DeviceSession
from kfac_engine.sessions.session import Session

# Twice differentiated graphs are made for one shape of the batch each; the oldest are forgotten.
_MOST_SHAPES = 8


class OnnxModel:
    """A canonical graph with its parameters and sessions.

    Args:
        loaded: The model as ``graph.load`` returns it.
        trainable: Patterns of parameter names; None takes what the graph uses like parameters.
        freeze: Patterns of names that are no parameters even so.
        threads: Threads for ONNX Runtime; 0 leaves the choice to it.
        sample_inputs: A batch for the sample run that finds element types and ranks; made up from
            the declared input shapes when left out.
        gradient_dtype: What ``to_file_layout`` gives for float16 and bfloat16 parameters, which are
            float32 in here: ``"file"`` for their own type, or ``"float32"``.
        tie_weights: Whether weights that are equal in the file are one parameter.
        scratch_bytes: Bound of the memory of products outside ONNX Runtime; None for 64 MiB.
        graph_passes: Names from ``passes.PASSES``; None for all of them.

    Attributes:
        graph: The canonical graph, in operators that have derivative rules.
        memory_space: Memory space that the model runs in; see ``move``.
        left_out: Parameters that are not trained after all, with the reason; see ``leave_out``.
        parameters: Name to current value; change values through ``set_parameters``.
        ties: Weights that are copies of parameters; ``to_file_layout`` and ``from_file_layout``
            include them.
        buffers: Running statistics of normalizations in training form, likewise; see
            ``buffers_after``.
        facts: Element type and shape of every value in the sample run.
        draws: Names of values that are drawn at random, in every forward pass anew.
        defined: Names of values added to those of the graph; add some through ``define``.

    Raises:
        ModelError: The model has no trainable parameter, or cannot be run on made-up inputs.
        InputError: ``gradient_dtype`` is something else.
        BackendError: ONNX Runtime cannot run the model.
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
        scratch_bytes: int | None = None,
        graph_passes: Sequence[str] | None = None,
    ) -> None:
        self.loaded = loaded = with_taken_branches(loaded, sample_inputs)
        self.threads, self.scratch_bytes = threads, scratch_bytes or SCRATCH_BYTES
        self.memory_space, self.graph_passes = HOST, chosen_passes(graph_passes)
        # Read-only, as the file holds them: a copy would double the memory of a large model.
        self.parameters: dict[str, Array] = {
            name: loaded.graph.constants[name]
            for name in trainable_parameters(loaded.graph, trainable, freeze)
        }
        self._by_default = trainable is None
        self.left_out: dict[str, str] = {}
        self.ties = find_ties(self.parameters, self.parameters) if tie_weights else ()
        for tie in self.ties:
            del self.parameters[tie.copy]
        self.handed_out_types = handed_out_types(loaded.stored, gradient_dtype)
        graph = tied(loaded.graph, self.ties) if self.ties else loaded.graph
        graph, self._statistics = with_running_statistics(graph)
        self.buffers = {name: graph.constants[name] for name in self._statistics}
        self._stored = ChainMap(self.parameters, self.buffers)
        graph, facts = lowered(graph, self.parameters, sample_inputs)
        names = self.parameters.keys()
        self.graph = plain_products(fold_weight_operands(graph, names), facts, names)
        self.facts = sample_facts(self.graph, sample_inputs) if self.graph is not graph else facts
        self.draws = drawn_values(self.graph)
        self._wanted: dict[str, None] = dict.fromkeys((*self.draws, *self._statistics.values()))
        self._forward: Session | DeviceSession | None = None
        self.defined: set[str] = set()
        self._appended: dict[str, Node] = {}
        self._appended_constants: dict[str, Array] = {}
        self._backwards: dict[tuple[object, ...], Backward] = {}
        self._twices: dict[tuple[object, ...], Backward] = {}
        self._sessions: dict[int, BackwardSession] = {}

    def leave_out(self, outputs: Sequence[str]) -> None:
        """Train no parameter behind whose values rounding hides the outputs, unless asked for."""
        if self._by_default:
            self.left_out = left_out(self.graph, self.facts, outputs, tuple(self.parameters))
            for name in self.left_out:
                del self.parameters[name]

    def move(self, memory_space: MemorySpace) -> None:
        """Run there from now on: parameters and buffers lie there, and what traces give does."""
        self.memory_space, self._forward = memory_space, None
        self._sessions.clear()
        for held in self.parameters, self.buffers:
            held.update({name: memory_space.as_feed(array) for name, array in held.items()})

    def run(
        self,
        inputs: Mapping[str, Array],
        targets: Array | Mapping[str, Array] | None = None,
        parameters: Mapping[str, Array] | None = None,
    ) -> Trace:
        """Evaluate the model on a batch.

        Args:
            inputs: Input name to array.
            targets: An array, named ``"targets"`` in the trace, or a mapping of names.
            parameters: Values for some parameters in place of the current ones.

        Returns:
            The evaluation: read any value of the graph, or differentiate it.

        Raises:
            InputError: An input is missing or of the wrong element type.
            UnknownNameError: A name is not an input of the model.
            ShapeError: An input does not fit its declared shape, or inputs do not fit each other.
            NonFiniteError: An input holds NaN or infinity.
        """
        checked = check_inputs(self.graph, inputs)
        feeds = {name: self.memory_space.as_feed(array) for name, array in checked.items()}
        feeds |= self._stored
        if parameters is not None:
            feeds |= self._checked(parameters)
        named = targets if isinstance(targets, Mapping) else {"targets": targets}
        own = {name: self.memory_space.to_device(a) for name, a in named.items() if a is not None}
        with explained(self.graph, checked):
            return Trace(self, feeds, own)

    def set_parameters(self, values: Mapping[str, Array]) -> None:
        """Replace parameter values; the next evaluation uses them. All are taken or none.

        Args:
            values: Parameter name to new value, in the parameter's shape.

        Raises:
            UnknownNameError: A name is not a trainable parameter.
            InputError: A parameter and a weight that is tied to it are given different values.
            ShapeError: A value has another shape than the parameter.
            NonFiniteError: A value holds NaN or infinity.
        """
        self.parameters.update(self._checked(values))

    def buffers_after(self, trace: Trace) -> dict[str, Array]:
        """The running statistics that a batch leaves, by name: copies."""
        return {old: trace[new].copy() for old, new in self._statistics.items()}

    def to_file_layout(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Parameters or their gradients as the user gets them: in the file's types, with copies.

        Args:
            values: Parameter name to array.

        Returns:
            Name to array, those of tied weights under every name.

        Raises:
            NonFiniteError: A number is too large for its type.
        """
        return in_types(spread(self.ties, values), self.handed_out_types)

    def from_file_layout(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Arrays of parameters and copies of them, by parameter.

        Args:
            values: Name to array.

        Returns:
            Parameter name to array.

        Raises:
            InputError: A parameter and its copy are given different arrays.
        """
        return gathered(self.ties, values)

    def static_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a constant, or of what is made of constants; None for data."""
        return self.facts[name].shape if self._is_static(name) else None

    def fetched(self) -> frozenset[str]:
        """Values that every forward pass hands over."""
        return frozenset(name for name in self._wanted if self._is_computed(name))

    def backwards(self) -> tuple[Backward, ...]:
        """All backward graphs asked for so far."""
        return tuple(self._backwards.values())

    def extended_graph(self) -> Graph:
        """The graph with the values that were added to it."""
        nodes = (*self.graph.nodes, *self._appended.values())
        constants = {**self.graph.constants, **self._appended_constants}
        return replace(self.graph, nodes=nodes, constants=constants)

    def want(self, names: Sequence[str]) -> None:
        """Have these values computed by every forward pass from now on."""
        missing = [name for name in names if name not in self._wanted]
        if missing:
            self._wanted.update(dict.fromkeys(missing))
            self._forward = None

    def define(self, node: Node, constants: Mapping[str, Array], like: str | Fact) -> None:
        """Add a value that the file does not name; traces know it from now on.

        Args:
            node: Computes it as its first result, from values of the graph.
            constants: Further operands, by name.
            like: Its element type and shape, or a value of the graph that has them.
        """
        self._appended[node.name] = node
        self._appended_constants |= constants
        self.facts[node.outputs[0]] = self.facts[like] if isinstance(like, str) else like
        self.defined.add(node.outputs[0])

    def extend(
        self, nodes: Sequence[Node], facts: Mapping[str, Fact], constants: Mapping[str, Array]
    ) -> None:
        """Add nodes behind those of the graph, before anything is differentiated.

        Args:
            nodes: In topological order.
            facts: Element type and shape of their results, and of ``constants``.
            constants: That they read.
        """
        known = {**self.graph.constants, **constants}
        self.graph = replace(self.graph, nodes=(*self.graph.nodes, *nodes), constants=known)
        self.facts = {**self.facts, **facts}

    def fetch(
        self, feeds: Mapping[str, Array], drawn: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """One forward pass over checked feeds: all wanted values, but those already ``drawn``."""
        drawn = drawn or {}
        asked = tuple(name for name in self._wanted if name not in drawn)
        if not asked:
            return {}
        session = (
            open_forward(self.context(), self.extended_graph(), asked, drawn)
            if drawn
            else self._forward_session()
        )
        return session.run(asked, {**feeds, **drawn})

    def backward(
        self, outputs: Sequence[str], wrt: Sequence[str], *, independent: bool = False
    ) -> Backward:
        """The backward graph from ``outputs`` to ``wrt``; what it needs is wanted from now on.

        Args:
            outputs: Values to differentiate.
            wrt: Values to differentiate with respect to.
            independent: Whether the gradient of one holds all other values of ``wrt`` fixed.

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
        """The backward graph of a backward graph; what it needs is wanted from now on.

        Args:
            backward: As ``self.backward`` returns it.
            feeds: Inputs and parameters of a batch, and cotangents: they say what shapes it is for.
            wrt: Values whose second derivative is asked for as well, independent variables.

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
            self._twices[key] = second = differentiate_twice(self.graph, backward, facts, wrt)
            self._adopt(second)
        return self._twices[key]

    def context(self) -> SessionContext:
        """The graph and the settings of its sessions."""
        return SessionContext(
            self.graph, self.facts, self.parameters.keys(), self._stored, self._is_static,
            self._frozen, self.memory_space, self.threads, self.scratch_bytes, self.graph_passes,
        )  # fmt: skip

    def fed(self, backward: Backward) -> tuple[str, ...]:
        """Inputs of a backward session besides cotangents: the values it reads but constants."""
        frozen = self._frozen
        return tuple(name for name in backward.saved if name not in frozen)

    def backward_session(self, backward: Backward) -> BackwardSession:
        """The session of a backward graph, built at its first use."""
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
        """Have forward passes compute what a backward graph is fed."""
        self._appended |= {node.name: node for node in backward.forward_nodes}
        self._appended_constants |= backward.constants
        self.want([name for name in self.fed(backward) if self._is_computed(name)])

    def _is_computed(self, name: str) -> bool:
        given = {entry.name for entry in self.graph.inputs}
        return name not in given and name not in self._stored

    def _checked(self, values: Mapping[str, Array]) -> dict[str, Array]:
        return check_parameters(
            self.graph.name, self.parameters, self.from_file_layout(values), self.memory_space
        )

    def _forward_session(self) -> Session | DeviceSession:
        if self._forward is None:
            self._forward = open_forward(
                self.context(), self.extended_graph(), tuple(self._wanted), {}
            )
        return self._forward
