"""Defines ``FactorOwner``, which stores the factors that a model's blocks create and share."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from kfac_engine.arguments import check_instance
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.select import select
from kfac_engine.curvature.config import CollectionConfig
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.statistics import Statistic
from kfac_engine.errors import InputError
from kfac_engine.losses.collection import LossCollection

if TYPE_CHECKING:  # a collection of named shapes needs no ONNX file, and none of its modules
    from kfac_engine.graph.analysis.subgraph import SubGraph
    from kfac_engine.runtime.model import OnnxModel

Factor = TypeVar("Factor", bound=FisherFactor)


class FactorOwner(LossCollection):
    """What the blocks of a model have in common: factors, options, backend and declared shapes.

    Args:
        graph: The model, or shapes of named tensors (``{"w": (4, 3)}``) for use without one.
        config: Options of averages, damping and inverses.
        backend: ``"auto"``, ``"numpy"`` or ``"cupy"``, or a result of ``select``.

    Attributes:
        graph: The model, or the shapes.
        fisher_factors: Factors by ``(class, arguments)``, in the order of creation.
        data: Names of inputs of the model, whose features may have units of their own.
        sets: The number of the set whose examples a value has, by its name, if there are several
            sets of examples.
    """

    def __init__(
        self,
        graph: "OnnxModel | Mapping[str, tuple[int, ...]] | None" = None,
        config: CollectionConfig | None = None,
        backend: str | Backend = "auto",
    ) -> None:
        super().__init__()
        if not isinstance(graph, Mapping | None) and not hasattr(graph, "static_shape"):
            raise InputError(
                f"graph must be a kfac_engine.OnnxModel or a dictionary of shapes, such as "
                f"{{'w': (4, 3)}}, got {graph!r:.80}."
            )
        self.graph = graph
        self.subgraph: SubGraph | None = None
        self.config = CollectionConfig() if config is None else config
        check_instance("config", self.config, CollectionConfig)
        self.backend = select(backend) if isinstance(backend, str) else backend
        self.fisher_factors: dict[tuple[object, ...], FisherFactor] = {}
        self.data: frozenset[str] = frozenset()
        self.sets: Mapping[str, int] = {}

    def get_factors(self) -> tuple[FisherFactor, ...]:
        """Return all factors in the order of creation, the input factor of a block first."""
        return tuple(self.fisher_factors.values())

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the declared shape of a tensor; None if it is unknown before the first batch."""
        if not isinstance(self.graph, Mapping):
            return None if self.graph is None else self.graph.static_shape(name)
        return tuple(self.graph[name]) if name in self.graph else None

    def require_shape(self, name: str) -> tuple[int, ...]:
        """Return the declared shape of a tensor.

        Raises:
            InputError: The shape is unknown.
        """
        shape = self.shape_of(name)
        if shape is None:
            raise InputError(
                f"the shape of '{name}' is needed to register its layer: name it in "
                f"LayerCollection(graph={{'{name}': (…), …}})."
            )
        return shape

    def make_or_get_factor(
        self,
        cls: type[Factor],
        args: tuple[object, ...],
        sources: tuple[tuple[Statistic, ...], ...] = (),
    ) -> Factor:
        """Return the factor ``cls(*args)``, which layers with equal arguments share.

        ``args`` are hashable, and ``sources`` are as in ``FisherFactor``.
        """
        key = (cls, *args, *sources)
        if key not in self.fisher_factors:
            new = cls(*args, backend=self.backend, config=self.config)  # type: ignore[arg-type] # args are cls's own
            if sources:
                new.set_sources(sources)
            self.fisher_factors[key] = new
        factor = self.fisher_factors[key]
        factor.companions = self.fisher_factors
        assert isinstance(factor, cls)
        return factor
