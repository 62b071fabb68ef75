"""What runs a backward graph: one session, or a session and the products that it leaves to us."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kfac_engine._types import DType
from kfac_engine.autodiff.device_session import DeviceSession
from kfac_engine.autodiff.differentiate import Backward
from kfac_engine.autodiff.finish import FinishingSession, divided
from kfac_engine.autodiff.fused import fused_products
from kfac_engine.autodiff.layouts import laid_out
from kfac_engine.autodiff.passes import FUSED_TRANSPOSES, WEIGHT_GRADIENTS
from kfac_engine.autodiff.placement import open_session
from kfac_engine.autodiff.runtime import Session
from kfac_engine.backend.place import HOST
from kfac_engine.backend.threads import Workers
from kfac_engine.graph.compact import compact_model
from kfac_engine.graph.structure import Input
from kfac_engine.graph.subgraph import read_by

if TYPE_CHECKING:
    from kfac_engine.autodiff.model import OnnxModel


def open_backward(
    model: "OnnxModel", backward: Backward, fetched: Mapping[str, DType]
) -> Session | DeviceSession | FinishingSession:
    """A session where the model runs; on the CPU it leaves gradients of kernels to BLAS.

    Args:
        model: The model.
        backward: A backward graph of it.
        fetched: Element types of values that the forward session hands over.

    Returns:
        What takes all that ``model.fed`` names, and cotangents, and gives gradients.
    """
    if model.place is not HOST:
        return _open(model, backward, fetched)
    parts = divided(backward, apart=WEIGHT_GRADIENTS in model.graph_passes)
    session = _open(model, parts.session, fetched) if parts.session.gradients else None
    workers = Workers(model.threads or None)
    return FinishingSession(session, parts, model.graph.constants, workers, model.scratch_bytes)


def _open(
    model: "OnnxModel", backward: Backward, fetched: Mapping[str, DType]
) -> Session | DeviceSession:
    graph, fed = model.graph, model.fed(backward)
    inputs = [Input(name, dtype, None) for name, dtype in backward.dtypes.items()]
    inputs += [
        Input(name, model.facts[name].dtype if name in model.facts else fetched[name], None)
        for name in fed
    ]
    made = {name for node in backward.nodes for name in node.outputs}
    constants = {**graph.constants, **backward.constants}
    handed = {*backward.gradients.values()}
    nodes = fused_products(backward, fuse=FUSED_TRANSPOSES in model.graph_passes)
    laid = laid_out(model, nodes, handed, constants)
    message = compact_model(
        laid.nodes,
        inputs,
        tuple(dict.fromkeys(name for name in backward.gradients.values() if name in made)),
        read_by(laid.nodes, {**constants, **laid.constants}, excluded=frozenset(fed)),
        graph.opset,
        name=f"{graph.name}_backward",
        domains=graph.domains,
    )
    return open_session(
        message,
        threads=model.threads,
        what=f"the backward graph of '{graph.name}'",
        place=model.place,
    )
