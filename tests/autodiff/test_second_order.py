"""Products with the Jacobian and second derivatives of every operator that has a rule."""

import numpy as np
import pytest

from kfac_engine.autodiff.second_order import differentiate_twice, joint_graph
from kfac_engine.graph.structure import Fact
from tests.autodiff.all_cases import ONLY_FIRST, SMOOTH
from tests.autodiff.harness import DTYPES, bench, compiled, draw

BATCH = 3

# Central differences along one direction err by step² times a third derivative, about 1e-9 where
# the operands are of order one; second derivatives lose some digits more.
STEP = 2.0**-14
TOLERANCES = {"reference": 1e-5, "ort": 2e-3}


class Twice:
    """A case, differentiated twice, on one batch."""

    def __init__(self, case, runtime):
        self.made = bench(case, runtime, BATCH)
        self.runtime = runtime
        arrays = draw(case, DTYPES[runtime], BATCH)
        self.feeds = {name: arrays[name] for name in self.made.sample}
        rng = np.random.default_rng(1)
        facts = self.made.facts
        self.cotangents = {n: self.normal(rng, facts[n].shape) for n in self.made.outputs}
        self.tangents = {n: self.normal(rng, self.feeds[n].shape) for n in self.made.wrt}

    def normal(self, rng, sides):
        # Numbers that float32 holds exactly: both runtimes differentiate at the same point.
        return np.asarray(np.float32(rng.normal(size=sides)), DTYPES[self.runtime])

    def products(self):
        """J v by output, and the second derivative times v by operand."""
        made, first = self.made, self.made.backward
        named = {first.cotangents[name]: g for name, g in self.cotangents.items()}
        joint = joint_graph(made.graph, first)
        feeds_and_cotangents = {**self.feeds, **named}
        values = {**joint.constants, **feeds_and_cotangents}
        results = [name for node in joint.nodes for name in node.outputs if name]
        values |= compiled(
            self.runtime, joint, joint.nodes, joint.constants, feeds_and_cotangents, results
        )(feeds_and_cotangents)
        facts = {name: Fact(array.dtype, array.shape) for name, array in values.items()}
        second = differentiate_twice(made.graph, first, facts, made.wrt)
        fed = dict(named)
        for name, gradient in first.gradients.items():
            tangent = second.cotangents[gradient]
            fed[tangent] = np.asarray(fed.get(tangent, 0) + self.tangents[name])
        known = {**made.graph.constants, **self.feeds}
        computed = [name for name in second.saved if name not in known]
        nodes = (*made.graph.nodes, *second.forward_nodes)
        constants = {**made.graph.constants, **second.constants}
        forward = compiled(self.runtime, made.graph, nodes, constants, self.feeds, computed)
        fed |= {name: known[name] for name in second.saved if name in known} | forward(self.feeds)
        asked = [n for n in dict.fromkeys(second.gradients.values()) if n not in fed]
        run = compiled(self.runtime, made.graph, second.nodes, second.constants, fed, asked)
        found = fed | run(fed)
        found = {name: found[gradient] for name, gradient in second.gradients.items()}
        moved = {n: found.get(c, 0.0) for n, c in first.cotangents.items()}
        return moved, {name: found.get(name, 0.0) for name in made.wrt}

    def differences(self):
        """The same from central differences of values and of gradients."""
        made = self.made
        evaluate = made.forward(self.feeds, made.outputs)
        ends = []
        for sign in (1, -1):
            moved = {
                n: np.asarray(self.feeds[n] + sign * STEP * v) for n, v in self.tangents.items()
            }
            feeds = {**self.feeds, **moved}
            gradients = made.gradients(feeds, self.cotangents)
            ends.append((evaluate(feeds), {n: gradients.get(n, 0.0) for n in made.wrt}))
        (values, gradients), (values_below, gradients_below) = ends
        return (
            {n: (values[n] - values_below[n]) / (2 * STEP) for n in made.outputs},
            {n: (gradients[n] - gradients_below[n]) / (2 * STEP) for n in made.wrt},
        )


@pytest.mark.parametrize("case", SMOOTH, ids=str)
def test_jacobian_and_hessian_products_equal_finite_differences(case):
    exact = Twice(case, "reference")
    moved, bent = exact.differences()
    truth = (moved,) if str(case) in ONLY_FIRST else (moved, bent)
    for twice in (exact, Twice(case, "ort")):
        runtime, tolerance = twice.runtime, TOLERANCES[twice.runtime]
        for found, expected in zip(twice.products(), truth, strict=False):
            for name, value in expected.items():
                scale = max(1.0, np.abs(value).max(initial=0))
                np.testing.assert_allclose(
                    found[name] + np.zeros_like(value), value, rtol=0, atol=tolerance * scale,
                    err_msg=f"{name} in {runtime}",
                )  # fmt: skip
