"""Defines ``MatchContext`` and ``LayerMatch``, a matcher's input and result."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from kfac_engine._types import Array, DType, Params
from kfac_engine.graph.analysis.subgraph import of_data
from kfac_engine.graph.structure import ONLY_SHAPES, Fact, Graph, Node
from kfac_engine.layers.layer_forms import LayerForm, ScaleShiftForm
from kfac_engine.layers.parameter_views import ParameterView

# Name of a tensor, or one name for each use of a layer.
Tensors: TypeAlias = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NewValue:
    """A value that a layer reads and the graph does not compute."""

    node: Node  # node whose first result is the value; it reads values of the graph
    constants: Mapping[str, Array]  # further operands of the node, by name
    like: str | Fact  # element type and shape of the value, or the name of a value that has them


@dataclass(frozen=True, slots=True)
class LayerMatch:
    """A layer, or a parameter without a layer."""

    # Layer kind in ``curvature/approximations``; ``"generic"`` for a parameter without a layer.
    kind: str
    parameters: tuple[str, ...]  # names of the weight and of the bias, if any; one name if generic
    inputs: Tensors = ""  # name of the layer's input, or one for each use; empty if generic
    outputs: Tensors = ""  # name of the pre-activation, or one for each use; empty if generic
    # Layout of the tensors and parameters; None if generic. Whether it has a bias follows from
    # ``parameters``.
    form: LayerForm | ScaleShiftForm | None = None
    reason: str = ""  # the reason why a parameter has no layer; empty for layers
    # Inputs that the graph does not compute, at most one for each use.
    computed: tuple[NewValue, ...] = ()
    # Parts of the outputs that the graph reads apart: see ``output_parts``.
    output_parts: tuple[Array, ...] = field(default=(), compare=False)

    @property
    def key(self) -> Params:
        """The key of the layer's block in a collection: one name, or several as a tuple."""
        return self.parameters if len(self.parameters) > 1 else self.parameters[0]


@dataclass(frozen=True)
class MatchContext:
    """A graph with the facts that matchers read."""

    graph: Graph  # the canonical graph
    # Names of values that have entries of parameters and are operands of computations.
    trainable: frozenset[str]
    shapes: Mapping[str, tuple[int, ...]]  # shape of every value in the sample run
    batch: int  # number of examples in the sample run
    # The parameter entries that a value consists of, by value name.
    views: Mapping[str, ParameterView]
    dtypes: Mapping[str, DType]  # element types of values
    # Axes of the examples, by value name; values whose examples share an axis with positions are
    # absent.
    axes: Mapping[str, int]
    # Names in ``trainable`` whose entries are read in another layout, too.
    shared: frozenset[str] = frozenset()
    # Whether values that depend on the shape of the data alone, such as the initial state of a
    # recurrence, count as data.
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
