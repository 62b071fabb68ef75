"""Evaluates a model in inference form, without derivatives."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kfac_engine._types import Array
from kfac_engine.autodiff.inference_form import inference_form
from kfac_engine.errors import NonFiniteError
from kfac_engine.graph.analysis.subgraph import SubGraph
from kfac_engine.runtime.forward_session import open_forward
from kfac_engine.runtime.inputs import check_inputs, explained, finite, naming, not_finite
from kfac_engine.runtime.model import OnnxModel
from kfac_engine.sessions.device_session import DeviceSession
from kfac_engine.sessions.session import Session


class InferenceModel:
    """A model in inference form, with its current parameters and running statistics.

    Its sessions compute the requested values only, so that activations are released during the run.
    The first request for a set of values builds its session.

    Args:
        model: The model, which does not move to another memory space.
    """

    def __init__(self, model: OnnxModel) -> None:
        self._model = model
        self._sessions: dict[tuple[str, ...], Session | DeviceSession] = {}

    def run(self, inputs: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        """Return values for a batch.

        Args:
            inputs: Map from each input to an array.
            names: Names of values of the graph.

        Returns:
            Map from each value to a read-only array, in the shape and element type of the value.

        Raises:
            InputError: An input is missing or of the wrong element type.
            UnknownNameError: A name is not an input of the model.
            ShapeError: An input does not fit its declared shape, or inputs do not fit each other.
            NonFiniteError: A value contains NaN or infinity, and an input does.
        """
        model = self._model
        checked = check_inputs(model.graph, inputs)
        feeds = {name: model.memory_space.as_feed(array) for name, array in checked.items()}
        feeds |= {**model.parameters, **model.buffers}
        known = {**model.graph.constants, **feeds}
        computed = tuple(name for name in dict.fromkeys(names) if name not in known)
        results: dict[str, Array] = {}
        if computed:
            with explained(model.graph, checked):
                results = self._session(computed).run(computed, feeds)
            suspects = not_finite(checked)
            bad = [name for name in computed if suspects and not finite(results[name])]
            with naming(suspects):
                if bad:
                    raise NonFiniteError(f"'{bad[0]}' holds NaN or infinity.")
        return {name: results[name] if name in results else known[name] for name in names}

    def _session(self, names: tuple[str, ...]) -> Session | DeviceSession:
        if names not in self._sessions:
            model = self._model
            graph = inference_form(model.extended_graph(), model.buffers)
            part = replace(graph, nodes=SubGraph(graph, names).nodes)
            self._sessions[names] = open_forward(model.context(), part, names, {})
        return self._sessions[names]
