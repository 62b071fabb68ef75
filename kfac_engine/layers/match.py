"""What discovery says of a parameter, and what it looks at: shared by all matchers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from kfac_engine._types import Array, DType
from kfac_engine.graph.analysis.rearrangements import ONLY_SHAPES
from kfac_engine.graph.analysis.subgraph import of_data
from kfac_engine.graph.structure import Fact, Graph, Node
from kfac_engine.layers.parameter_slices import Held

# Name of a tensor, or names over the uses of a layer.
Tensors: TypeAlias = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NewValue:
    """A value that a layer needs and the graph lacks.

    Attributes:
        node: Computes it as its first result, from values of the graph.
        constants: Further operands, by name.
        like: Its type and shape, or a value of the graph that has them.
    """

    node: Node
    constants: Mapping[str, Array]
    like: str | Fact


@dataclass(frozen=True, slots=True)
class LayerMatch:
    """A layer, or a parameter without one.

    Attributes:
        kind: A kind of the table of approximations; ``"generic"`` for a parameter without a layer.
        parameters: The weight and the bias if there is one; a single parameter if generic.
        inputs: Name of the layer's input, or names over its uses; empty if generic.
        outputs: Name of its output before any nonlinearity, likewise; empty if generic.
        options: Keyword arguments of the registration: formats, strides, padding.
        reason: Why a parameter is generic; empty for layers.
        computed: Computes inputs that the graph does not, one a use.
    """

    kind: str
    parameters: tuple[str, ...]
    inputs: Tensors = ""
    outputs: Tensors = ""
    options: Mapping[str, object] = field(default_factory=dict)
    reason: str = ""
    computed: tuple[NewValue, ...] = ()


@dataclass(frozen=True)
class MatchContext:
    """What a matcher looks at.

    Attributes:
        graph: The canonical graph.
        trainable: Values that are computed with and hold entries of parameters.
        shapes: Shape of every value in a sample run.
        batch: Length of the batch axis in that run.
        held: Where the entries of parts of parameters lie.
        dtypes: Element types of values.
        axes: The axis that holds the examples, of values that have them alone on one.
        shared: Those of ``trainable`` whose entries are computed with in another layout as well.
        by_shape: Whether what depends on the data by its shape alone counts as data: the initial
            state of a recurrence.
    """

    graph: Graph
    trainable: frozenset[str]
    shapes: Mapping[str, tuple[int, ...]]
    batch: int
    held: Mapping[str, Held]
    dtypes: Mapping[str, DType]
    axes: Mapping[str, int]
    shared: frozenset[str] = frozenset()
    by_shape: bool = False

    @cached_property
    def loose(self) -> "MatchContext":
        """The same with ``by_shape``."""
        return replace(self, by_shape=True)

    @cached_property
    def data(self) -> frozenset[str]:
        """Values that depend on the data inputs, by more than their shape unless ``by_shape``."""
        return of_data(self.graph, () if self.by_shape else ONLY_SHAPES)

    def only_user(self, value: str) -> tuple[Node | None, int]:
        """The only node that reads a value, or None, and the index of the value in its operands."""
        users = self.graph.consumers.get(value, ())
        return users[0] if len(users) == 1 and value not in self.graph.results else (None, 0)

    def is_weight(self, name: str, rank: int) -> bool:
        """Whether ``name`` is a parameter with so many axes."""
        return name in self.trainable and len(self.shapes[name]) == rank

    def goes_with(self, name: str, weight: str) -> bool:
        """Whether ``name`` is a parameter that is used as often as ``weight``, in one layout."""
        consumers = self.graph.consumers
        own = name in self.trainable and name not in self.shared
        return own and len(consumers[name]) == len(consumers[weight])

    def is_bias(self, name: str, weight: str, d_out: int, channel_axes: int = 0) -> bool:
        """Whether a parameter adds one number a feature wherever ``weight`` is used.

        Args:
            name: The bias in question.
            weight: The weight whose result it is added to.
            d_out: Features of that result.
            channel_axes: How many axes come after the features.

        Returns:
            The answer.
        """
        if not self.goes_with(name, weight):
            return False
        shape = self.shapes[name]
        position = len(shape) - 1 - channel_axes
        return position >= 0 and all(
            side == (d_out if axis == position else 1) for axis, side in enumerate(shape)
        )
