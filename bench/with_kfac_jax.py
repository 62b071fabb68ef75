"""Steps of kfac-jax, for networks of dense layers: its convolutions have no fast form on a CPU."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import kfac_jax

from kfac_engine.bench.jobs import DAMPING, DECAY, STEPS, Run
from kfac_engine.bench.step_networks import NETWORKS


def _step(network: str, batch: int, kind: str, cycle: int) -> Run:
    """``cycle`` steps with learning rate 0; the first result is the gradient that they use."""
    net, periods = NETWORKS[network](), STEPS[kind]
    names = [name.removesuffix(".weight") for name in net.weights if name.endswith(".weight")]
    weights = {n: (net.weights[f"{n}.weight"], net.weights[f"{n}.bias"]) for n in names}
    params = jax.tree.map(jnp.asarray, weights)
    data = jnp.asarray(net.inputs(batch)["x"]), jnp.asarray(net.targets(batch))
    value_and_grad = jax.value_and_grad(_loss)
    _, first = jax.jit(value_and_grad)(params, data)
    gradients = {f"{n}.{p}": g for n, pair in first.items() for p, g in _named(pair)}
    compared = [gradients[name] for name in net.compared]
    if periods is None:
        plain = jax.jit(value_and_grad)

        def run_plain() -> Any:
            for _ in range(cycle):
                jax.block_until_ready(plain(params, data))
            return compared

        return run_plain
    return _kfac_run(value_and_grad, params, data, periods, cycle, compared)


def _kfac_run(
    value_and_grad: Any, params: Any, data: Any, periods: tuple[int, int], cycle: int, compared: Any
) -> Run:
    optimizer = kfac_jax.Optimizer(
        value_and_grad, l2_reg=0.0, num_burnin_steps=0, estimation_mode="fisher_empirical",
        curvature_ema=DECAY, curvature_update_period=periods[0], inverse_update_period=periods[1],
        include_norms_in_stats=False,
    )  # fmt: skip
    key = jax.random.PRNGKey(0)
    state = optimizer.init(params, key, data)
    # Its own copies: they are given to the optimizer, which writes into them.
    params = jax.tree.map(jnp.copy, params)
    still, damping = jnp.asarray(0.0), jnp.asarray(DAMPING)

    def run() -> Any:
        nonlocal params, state
        for _ in range(cycle):
            params, state, _ = optimizer.step(
                params, state, key, batch=data, learning_rate=still, momentum=still, damping=damping
            )
        jax.block_until_ready(params)
        return compared

    return run


def _loss(params: Any, data: Any) -> Any:
    x, y = data
    *hidden, last = params.values()
    for weight, bias in hidden:
        x = jax.nn.relu(x @ weight + bias)
    logits = x @ last[0] + last[1]
    kfac_jax.register_softmax_cross_entropy_loss(logits, y)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)
    return -picked.mean()


def _named(pair: Any) -> tuple[tuple[str, Any], ...]:
    return ("weight", pair[0]), ("bias", pair[1])


OPERATIONS: Mapping[str, Callable[..., Any]] = {"step": _step}
