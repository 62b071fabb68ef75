"""The input and the result of a matcher: ``MatchContext`` and ``LayerMatch``."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from kfac_engine._types import Array, DType
from kfac_engine.graph.analysis.subgraph import of_data
from kfac_engine.graph.structure import ONLY_SHAPES, Fact, Graph, Node
from kfac_engine.layers.layer_forms import LayerForm, ScaleShiftForm
from kfac_engine.layers.parameter_slices import ParameterView

# Name of a tensor, or one name for each use of a layer.
Tensors: TypeAlias = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NewValue:
    """A value that a layer reads and the graph does not compute.

    Attributes:
        node: Node whose first result is the value; it reads values of the graph.
        constants: Further operands of the node, by name.
        like: Element type and shape of the value, or the name of a value that has them.
    """

    node: Node
    constants: Mapping[str, Array]
    like: str | Fact


@dataclass(frozen=True, slots=True)
class LayerMatch:
    """A layer, or a parameter without one.

    Attributes:
        kind: Layer kind in ``curvature/approximations``; ``"generic"`` for a parameter without a
            layer.
        parameters: Names of the weight and of the bias, if any; one name if generic.
        inputs: Name of the layer's input, or one for each use; empty if generic.
        outputs: Name of the pre-activation, or one for each use; empty if generic.
        form: Layout of the tensors and parameters; None if generic. Whether it has a bias follows
            from ``parameters``.
        reason: The reason why a parameter has no layer; empty for layers.
        computed: Inputs that the graph does not compute, at most one for each use.
        output_parts: Parts of the outputs that the graph reads apart: see ``output_parts``.
    """

    kind: str
    parameters: tuple[str, ...]
    inputs: Tensors = ""
    outputs: Tensors = ""
    form: LayerForm | ScaleShiftForm | None = None
    reason: str = ""
    computed: tuple[NewValue, ...] = ()
    output_parts: tuple[Array, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class MatchContext:
    """A graph with the facts that matchers read.

    Attributes:
        graph: The canonical graph.
        trainable: Names of values that have entries of parameters and are operands of computations.
        shapes: Shape of every value in the sample run.
        batch: Number of examples in the sample run.
        views: The parameter entries that a value consists of, by value name.
        dtypes: Element types of values.
        axes: Axes of the examples, by value name; values whose examples share an axis with
            positions are absent.
        shared: Names in ``trainable`` whose entries are read in another layout, too.
        by_shape: Whether values that depend on the shape of the data alone, such as the initial
            state of a recurrence, count as data.
    """

    graph: Graph
    trainable: frozenset[str]
    shapes: Mapping[str, tuple[int, ...]]
    batch: int
    views: Mapping[str, ParameterView]
    dtypes: Mapping[str, DType]
    axes: Mapping[str, int]
    shared: frozenset[str] = frozenset()
    by_shape: bool = False

    @cached_property
    def loose(self) -> "MatchContext":
        """The same context with ``by_shape=True``."""
        return replace(self, by_shape=True)

    @cached_property
    def data(self) -> frozenset[str]:
        """Names of values that depend on the data; with ``by_shape`` also on its shape alone."""
        return of_data(self.graph, () if self.by_shape else ONLY_SHAPES)

    def only_user(self, value: str) -> tuple[Node | None, int]:
        """Return the only node that reads a value, with the operand number; None for several."""
        users = self.graph.consumers.get(value, ())
        return users[0] if len(users) == 1 and value not in self.graph.results else (None, 0)

    def is_weight(self, name: str, rank: int) -> bool:
        """Return whether a value is a parameter with ``rank`` axes."""
        return name in self.trainable and len(self.shapes[name]) == rank

    def goes_with(self, name: str, weight: str) -> bool:
        """Return whether a value is a parameter of one layout, used as often as ``weight``."""
        consumers = self.graph.consumers
        in_one_layout = name in self.trainable and name not in self.shared
        return in_one_layout and len(consumers[name]) == len(consumers[weight])

    def is_bias(self, name: str, weight: str, d_out: int, channel_axes: int = 0) -> bool:
        """Return whether a value can be the bias of a layer: one number for each feature.

        The value is a parameter with ``d_out`` entries and as many uses as ``weight``.
        ``channel_axes`` is the number of axes of the pre-activation after its features.
        """
        if not self.goes_with(name, weight):
            return False
        shape = self.shapes[name]
        position = len(shape) - 1 - channel_axes
        return position >= 0 and all(
            size == (d_out if axis == position else 1) for axis, size in enumerate(shape)
        )
