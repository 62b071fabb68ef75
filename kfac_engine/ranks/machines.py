"""Predicted time of a step on several ranks, from a few constants of a cluster.

The model adds up a step: passes, statistics, messages, inverses and products, without overlap. A
message takes a latency for each doubling of the ranks, and its bytes divided by the bandwidth,
within a node first and then between nodes. The predictions have not been compared with a cluster.
"""

from dataclasses import dataclass, fields
from math import ceil, log2

from kfac_engine.ranks.cost import PASSES, Message, RankCost
from kfac_engine.ranks.sizes import FactorSize, ModelSize, Periods

# Votes of a step, each an all-reduce of a few bytes.
_VOTES = 3
# Time of the passes of SGD, in forward passes: a forward pass, and a backward pass of two.
_PASSES = 3


@dataclass(frozen=True, slots=True)
class Machine:
    """Constants of a cluster.

    Attributes:
        name: Its name in tables.
        passes: Operations a second of forward and backward passes, on one rank.
        products: Operations a second of statistics and preconditioning.
        inverses: Multiplications a second of inverses of large matrices, d³ each.
        half: Size of a matrix whose inverse runs at half of this rate.
        latency: Seconds of a message between two ranks.
        network: Bytes a second that a rank sends to other nodes.
        local: Bytes a second that a rank sends to ranks of its node.
        node: Number of ranks in a node.
        source: Where the constants come from.
    """

    name: str
    passes: float
    products: float
    inverses: float
    half: int
    latency: float
    network: float
    local: float
    node: int
    source: str


H200 = Machine(
    "H200 at 400 Gb/s",
    passes=100e12,
    products=65e12,
    inverses=20e12,
    half=4096,
    latency=15e-6,
    network=45e9,
    local=360e9,
    node=8,
    source="assumed: 8 GPUs in a node, 400 Gb/s each, NCCL; a quarter of the peak of TF32 in "
    "passes, half of the peak of three TF32 products, a sixth of that of float64 in inverses",
)
SLOW = Machine(
    "H200 at 25 Gb/s",
    passes=100e12,
    products=65e12,
    inverses=20e12,
    half=4096,
    latency=30e-6,
    network=2.8e9,
    local=360e9,
    node=8,
    source="assumed: the same nodes with 25 Gb/s for each GPU",
)
CPUS = Machine(
    "CPU at 100 Gb/s",
    passes=1.0e12,
    products=2.2e12,
    inverses=0.9e12,
    half=1024,
    latency=5e-6,
    network=11e9,
    local=11e9,
    node=1,
    source="rates measured with this package on 2 cores (docs/performance.md), times 16 for 32 "
    "cores and halved for their shared memory; 100 Gb/s assumed",
)
MACHINES = H200, SLOW, CPUS


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """Predicted seconds of a step, the mean over a period, on the rank that takes longest.

    Attributes:
        passes: Forward pass and backward passes.
        statistics: Statistics of the batch.
        messages: Collectives.
        votes: Agreement on errors before a step changes anything.
        inverses: Refresh of the inverses.
        products: Preconditioning.
    """

    passes: float
    statistics: float
    messages: float
    votes: float
    inverses: float
    products: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(float(getattr(self, field.name)) for field in fields(self))


def predict_step(
    model: ModelSize, cost: RankCost, machine: Machine, periods: Periods | None = None
) -> StepPrediction:
    """Predict the time of a step.

    Args:
        model: Sizes of the model, with rows and operations for the batch of one rank.
        cost: Result of ``rank_cost`` for this model and these periods.
        machine: The cluster.
        periods: Periods of refreshes and of updates; by default those of ``Schedule``.

    Returns:
        The seconds of each part.
    """
    periods, ranks = periods or Periods(), cost.ranks
    every, blocks = periods.covariance_every, model.blocks.values()
    factored = cost.distribution != "sgd"
    forward = sum(block.forward for block in blocks)
    statistics = sum(b.rows * sum(model.factors[n].numbers for n in b.factors) for b in blocks)
    return StepPrediction(
        passes=forward * (_PASSES + factored * model.sources / every) / machine.passes,
        statistics=factored * statistics / every / machine.products,
        messages=sum(_message(m, ranks, machine) / m.every for m in cost.messages),
        votes=factored * _VOTES * 2 * log2(ranks) * machine.latency,
        inverses=_refresh(model, cost, machine) / periods.refresh_every,
        products=cost.products / machine.products,
    )


def _message(message: Message, ranks: int, machine: Machine) -> float:
    """Return the seconds of a collective: of equal parts, or of the link of the largest part."""
    link = machine.network if ranks > machine.node else machine.local
    equal = _one_pass(message.bytes, ranks, machine)
    return PASSES[message.collective] * max(equal, message.largest / link)


def _one_pass(count: float, ranks: int, machine: Machine) -> float:
    """Return the seconds of a reduce-scatter or an all-gather with equal parts."""
    local, nodes = min(machine.node, ranks), ceil(ranks / machine.node)
    seconds = (local - 1) / local * count / machine.local + log2(local) * machine.latency
    if nodes > 1:
        seconds += (nodes - 1) / nodes * count / local / machine.network
        seconds += log2(nodes) * machine.latency
    return seconds


def _refresh(model: ModelSize, cost: RankCost, machine: Machine) -> float:
    """Return the seconds of a refresh of all factors on the rank that takes longest."""
    seconds: dict[int, float] = {}
    for name, ranks in cost.factor_owners.items():
        for rank in ranks:
            seconds[rank] = seconds.get(rank, 0.0) + _inverse(model.factors[name], machine)
    return max(seconds.values(), default=0.0)


def _inverse(factor: FactorSize, machine: Machine) -> float:
    """Return the seconds of a refresh; small matrices run at a lower rate."""
    size = factor.shape[-1] if factor.shape else 1
    return factor.refresh / machine.inverses * (size + machine.half) / size
