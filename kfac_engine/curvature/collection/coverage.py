"""Which parameters are accounted for, and how often, beside how often the model uses them."""

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
        graph: As given.
        subgraph: The part of the model that the losses depend on, as ``create_subgraph`` found it;
            None before, and where the collection knows no model.
    """

    def __init__(self, graph: OnnxModel | Mapping[str, tuple[int, ...]] | None) -> None:
        super().__init__()
        self.graph = graph
        self.subgraph: SubGraph | None = None
        self._uses: dict[str, float] = {}

    def create_subgraph(self) -> None:
        """Record the part of the model that the registered losses depend on.

        Raises:
            InputError: There is no loss.
        """
        self._require_losses()
        if isinstance(self.graph, OnnxModel):
            self.subgraph = SubGraph(self.graph.graph, self._loss_inputs())

    def finalize(self) -> None:
        """Close the collection: an estimator builds on what is registered now.

        Raises:
            RegistrationError: It is closed already; a collection serves one estimator.
            InputError: There is no loss.
        """
        self._require_open("an estimator")
        self.create_subgraph()
        self._finalized = True

    def check_registration(self, variables: Sequence[str]) -> None:
        """Check that blocks cover exactly these parameters, with as many uses as the graph shows.

        Uses are compared only where the collection knows the model; those that no loss depends on
        are none.

        Args:
            variables: All parameters that should have a block.

        Raises:
            RegistrationError: One is not covered, a covered one is not listed, or uses differ; the
                message lists all.
        """
        listed = dict.fromkeys(variables)
        wrong = [f"{name} is not registered" for name in listed if name not in self._uses]
        wrong += [
            f"{name} is registered, but not listed" for name in self._uses if name not in listed
        ]
        if isinstance(self.graph, OnnxModel):
            graph = self.graph.graph
            reached = SubGraph(graph, self._loss_inputs() or graph.values())
            found = {name: reached.variable_uses(name) for name in self._uses}
            wrong += [
                f"{name} is registered with {uses:g} use(s), the graph has {found[name]}"
                for name, uses in self._uses.items()
                if uses not in (inf, found[name])
            ]
        if wrong:
            raise RegistrationError(f"the registration is not complete: {'; '.join(wrong)}.")

    def _loss_inputs(self) -> list[str]:
        return [name for loss in self.losses for name in loss.inputs]

    def _count_uses(self, names: Sequence[str], uses: float) -> None:
        for name in names:
            self._uses[name] = self._uses.get(name, 0) + uses
