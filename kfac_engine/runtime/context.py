"""Stores the graph and the settings that a model's sessions are built from."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from kfac_engine._types import Array
from kfac_engine.autodiff.differentiate import Backward
from kfac_engine.backend.memory_space import MemorySpace
from kfac_engine.graph.structure import Fact, Graph


@dataclass(frozen=True, slots=True)
class SessionContext:
    """A graph with the settings of its sessions."""

    graph: Graph  # canonical graph
    facts: Mapping[str, Fact]  # element type and shape of every value in the sample run
    parameters: Set[str]  # names of the parameters
    # Parameters and running statistics by name; sessions receive them as inputs.
    stored: Mapping[str, Array]
    # Function that returns whether a value does not depend on data.
    is_static: Callable[[str], bool]
    frozen: Set[str]  # names of constants that are part of the sessions
    memory_space: MemorySpace  # memory space that the sessions compute in
    threads: int  # number of threads of ONNX Runtime; 0 for its default
    graph_passes: Set[str]  # names from ``runtime.cpu.graph_passes.PASSES``
    start: str  # input of forward sessions with the start of random numbers; empty without any

    def fed(self, backward: Backward) -> tuple[str, ...]:
        """Return the inputs of a backward session, except cotangents and constants."""
        return tuple(name for name in backward.saved if name not in self.frozen)
