"""The graph and the settings from which sessions of a model are built."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from kfac_engine._types import Array
from kfac_engine.autodiff.differentiate import Backward
from kfac_engine.backend.memory_space import MemorySpace
from kfac_engine.graph.structure import Fact, Graph


@dataclass(frozen=True, slots=True)
class SessionContext:
    """A graph with the settings of its sessions.

    Attributes:
        graph: Canonical graph.
        facts: Element type and shape of every value in the sample run.
        parameters: Names of the parameters.
        stored: Parameters and running statistics by name; sessions receive them as inputs.
        is_static: Function that returns whether a value does not depend on data.
        frozen: Names of constants that are part of the sessions.
        memory_space: Memory space that the sessions compute in.
        threads: Number of threads of ONNX Runtime; 0 for its default.
        graph_passes: Names from ``runtime.cpu.graph_passes.PASSES``.
        start: Input of forward sessions with the start of random numbers; empty without any.
    """

    graph: Graph
    facts: Mapping[str, Fact]
    parameters: Set[str]
    stored: Mapping[str, Array]
    is_static: Callable[[str], bool]
    frozen: Set[str]
    memory_space: MemorySpace
    threads: int
    graph_passes: Set[str]
    start: str

    def fed(self, backward: Backward) -> tuple[str, ...]:
        """Return the inputs of a backward session, except cotangents and constants."""
        return tuple(name for name in backward.saved if name not in self.frozen)
