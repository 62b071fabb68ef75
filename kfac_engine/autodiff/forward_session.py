"""The session that runs the forward graph of a model."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kfac_engine._types import Array
from kfac_engine.autodiff.device_session import DeviceSession
from kfac_engine.autodiff.draws import given_draws
from kfac_engine.autodiff.layouts import laid_out
from kfac_engine.autodiff.placement import open_session
from kfac_engine.autodiff.runtime import Session
from kfac_engine.graph.compact import compact_model
from kfac_engine.graph.structure import Input
from kfac_engine.graph.subgraph import read_by

if TYPE_CHECKING:
    from kfac_engine.autodiff.model import OnnxModel


def open_forward(
    model: "OnnxModel", asked: Sequence[str], drawn: Mapping[str, Array]
) -> Session | DeviceSession:
    """A session where the model runs, of its graph with the values that were added to it.

    Args:
        model: The model.
        asked: Names of the values that it computes.
        drawn: Values drawn at random that it is fed instead of drawing them.

    Returns:
        The session; it is fed inputs, parameters, buffers and ``drawn``.
    """
    graph, stored = model.extended_graph(), {**model.parameters, **model.buffers}
    nodes = given_draws(graph.nodes, drawn)
    laid = laid_out(model, nodes, asked, graph.constants)
    fed = {**stored, **drawn}
    message = compact_model(
        laid.nodes,
        [*graph.inputs, *(Input(name, array.dtype, None) for name, array in fed.items())],
        asked,
        read_by(laid.nodes, {**graph.constants, **laid.constants}, excluded=stored),
        graph.opset,
        name=graph.name,
        domains=graph.domains,
    )
    what = f"the forward graph of '{graph.name}'"
    return open_session(message, threads=model.threads, what=what, place=model.place)
