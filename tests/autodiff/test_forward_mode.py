"""First and second derivatives of every operator in forward mode, against differences of values."""

import numpy as np
import pytest

from kfac_engine.autodiff.differentiate import needed
from kfac_engine.autodiff.forward_builder import ForwardBuilder
from kfac_engine.autodiff.forward_mode import Jet, push_jets
from kfac_engine.graph.structure import Fact
from tests.autodiff.all_cases import ONLY_FIRST, SMOOTH
from tests.autodiff.harness import DTYPES, bench, compiled, draw
from tests.nightly import nightly_but

# Facts come from another batch than the results: a size baked into the nodes fails there.
SAMPLE_BATCH, BATCH = 3, 4

# Central differences err by step² times a higher derivative, 1e-6, and by 1e-16/step², 1e-10.
# The terms that are neglected are small beside these, because directions are short.
STEP, LENGTH = 2.0**-10, 2.0**-5
TOLERANCE = 2e-5

# Directions 0 and 1; the curve along direction 0 bends by direction 2.
SUMS = (((0, 0),), ((0, 1),), ((0, 0), (1, 1)))


class Forward:
    """The derivatives of a case along directions, on one batch."""

    def __init__(self, case):
        self.made = made = bench(case, "reference", SAMPLE_BATCH)
        arrays = draw(case, DTYPES["reference"], BATCH)
        self.feeds = {name: arrays[name] for name in made.sample}
        rng = np.random.default_rng(1)
        self.directions = {
            name: [LENGTH * rng.normal(size=self.feeds[name].shape) for _ in range(3)]
            for name in made.wrt
        }
        self.builder = ForwardBuilder(made.graph, made.facts, measure, self.sample)

    def sample(self, names):
        names = tuple(names)
        computed = [name for name in names if name not in self.made.sample]
        graph, fed = self.made.graph, self.made.sample
        values = compiled("reference", graph, graph.nodes, graph.constants, fed, computed)(fed)
        return {**values, **{name: fed[name] for name in names if name in fed}}

    def results(self):
        """Tangents by output, then second derivatives by output for each sum."""
        jets = {
            name: Jet({i: f"{name}/{i}" for i in (0, 1)}, {0: f"{name}/2"})
            for name in self.made.wrt
        }
        seeds = {f"{n}/{i}": v for n, vs in self.directions.items() for i, v in enumerate(vs)}
        self.builder.facts |= {s: self.made.facts[s[:-2]] for s in seeds}
        found, _ = push_jets(self.builder, jets, SUMS, self.made.outputs)
        names = {}
        for output in self.made.outputs:
            jet = found.get(output, Jet())
            names |= {(output, "first", i): name for i, name in jet.tangents.items()}
            names |= {(output, "second", i): name for i, name in jet.seconds.items()}
        graph = self.made.graph
        wanted = [name for name in dict.fromkeys(names.values()) if name not in seeds]
        nodes = needed((*graph.nodes, *self.builder.nodes), wanted)
        constants = {**graph.constants, **self.builder.constants}
        fed = {**self.feeds, **seeds}
        values = fed | compiled("reference", graph, nodes, constants, fed, wanted)(fed)
        return {key: values[name] for key, name in names.items()}

    def at(self, first, second=0.0, bend=0.0):
        """The outputs at a point away from the sample along directions 0, 1 and 2."""
        moved = {
            name: np.asarray(self.feeds[name] + first * a + second * b + bend * c)
            for name, (a, b, c) in self.directions.items()
        }
        values = self.made.forward(self.feeds, self.made.outputs)({**self.feeds, **moved})
        return {name: values[name] for name in self.made.outputs}

    def truth(self):
        h = STEP
        middle = self.at(0)
        ends = {s: self.at(s * h) for s in (1, -1)}
        sides = {s: self.at(0, s * h) for s in (1, -1)}
        corners = {(s, t): self.at(s * h, t * h) for s in (1, -1) for t in (1, -1)}
        curve = {s: self.at(s * h, 0, h * h / 2) for s in (1, -1)}
        found = {}
        for n in self.made.outputs:
            found[n, "first", 0] = (ends[1][n] - ends[-1][n]) / (2 * h)
            found[n, "first", 1] = (sides[1][n] - sides[-1][n]) / (2 * h)
            found[n, "second", 0] = (curve[1][n] + curve[-1][n] - 2 * middle[n]) / h**2
            mixed = corners[1, 1][n] + corners[-1, -1][n] - corners[1, -1][n] - corners[-1, 1][n]
            found[n, "second", 1] = mixed / (4 * h**2)
            both = (ends[1][n] + ends[-1][n] + sides[1][n] + sides[-1][n] - 4 * middle[n]) / h**2
            found[n, "second", 2] = both
        return found


def measure(graph, feeds):
    names = [name for node in graph.nodes for name in node.outputs if name]
    with np.errstate(all="ignore"):  # the numbers do not matter, and may be at poles
        values = compiled("reference", graph, graph.nodes, graph.constants, feeds, names)(feeds)
    known = {**graph.constants, **feeds, **values}
    return {name: Fact(array.dtype, array.shape) for name, array in known.items()}


# The gate has one case of each operator.
GATE = tuple({case.op: case for case in reversed(SMOOTH)}.values())


@pytest.mark.parametrize("case", nightly_but(GATE, SMOOTH))
def test_forward_derivatives_equal_differences(case):
    forward = Forward(case)
    found = forward.results()
    for key, value in forward.truth().items():
        if key[1] == "second" and str(case) in ONLY_FIRST:
            continue
        scale = max(LENGTH ** (1 + (key[1] == "second")), np.abs(value).max(initial=0))
        actual = found.get(key, np.zeros_like(value))
        assert actual.shape == value.shape, key
        np.testing.assert_allclose(
            actual, value, rtol=0, atol=TOLERANCE * scale, err_msg=str(key)
        )  # fmt: skip
