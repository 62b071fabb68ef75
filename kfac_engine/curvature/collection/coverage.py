"""The comparison of registered parameters and uses with those of the graph."""

from collections.abc import Mapping, Sequence
from math import inf

from kfac_engine.compat.loss_registrations import LossRegistrations
from kfac_engine.errors import RegistrationError
from kfac_engine.graph.analysis.subgraph import SubGraph
from kfac_engine.runtime.model import OnnxModel


class Coverage(LossRegistrations):
    """The part of ``LayerCollection`` that compares registrations with the graph.

    Args:
        graph: As in ``LayerCollection``.

    Attributes:
        graph: The model, or shapes by name.
        subgraph: The part of the model that the losses depend on; None before
            ``create_subgraph``, and without a model.
    """

    def __init__(self, graph: OnnxModel | Mapping[str, tuple[int, ...]] | None) -> None:
        super().__init__()
        self.graph = graph
        self.subgraph: SubGraph | None = None
        self._uses: dict[str, float] = {}

    def create_subgraph(self) -> None:
        """Record the part of the model that the registered losses depend on.

        Raises:
            InputError: No loss is registered.
        """
        self._require_losses()
        if isinstance(self.graph, OnnxModel):
            self.subgraph = SubGraph(self.graph.graph, self._loss_inputs())

    def finalize(self) -> None:
        """Close the collection for registrations, because an estimator uses it.

        Raises:
            RegistrationError: It is closed already: a collection belongs to one estimator.
            InputError: No loss is registered.
        """
        self._require_open("an estimator")
        self.create_subgraph()
        self._finalized = True

    def check_registration(self, variables: Sequence[str]) -> None:
        """Check that blocks cover exactly these parameters, with as many uses as in the graph.

        Uses are compared only if the collection has a model. Uses that no loss depends on do not
        count.

        Args:
            variables: All parameters that must have a block.

        Raises:
            RegistrationError: A parameter has no block, a block has other parameters, or uses
                differ; the message lists all differences.
        """
        listed = dict.fromkeys(variables)
        wrong = [f"{name} is not registered" for name in listed if name not in self._uses]
        wrong += [
            f"{name} is registered, but not listed" for name in self._uses if name not in listed
        ]
        if isinstance(self.graph, OnnxModel):
            graph = self.graph.graph
            reached = SubGraph(graph, self._loss_inputs() or graph.values())
            counts = {name: reached.variable_uses(name) for name in self._uses}
            wrong += [
                f"{name} is registered with {uses:g} use(s), the graph has {counts[name]}"
                for name, uses in self._uses.items()
                if uses not in (inf, counts[name])
            ]
        if wrong:
            raise RegistrationError(f"the registration is not complete: {'; '.join(wrong)}.")

    def _loss_inputs(self) -> list[str]:
        return [name for loss in self.losses for name in loss.inputs]

    def _count_uses(self, names: Sequence[str], uses: float) -> None:
        for name in names:
            self._uses[name] = self._uses.get(name, 0) + uses
