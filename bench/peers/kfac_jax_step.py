"""Steps of kfac-jax, compiled by its optimizer."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import kfac_jax
from kfac_jax._src import patches_second_moment

from kfac_engine.bench.jobs import DAMPING, DECAY, GRADIENT, STEPS, Run
from kfac_engine.bench.peers.jax_networks import FUNCTIONS, from_onnx, images_last, to_onnx
from kfac_engine.bench.step_networks import NETWORKS

# The default second moment of patches takes 0.2 s for each example of a ResNet-20 on a CPU. The
# library exports another function for the same moments, which takes a hundredth of that time.
patches_second_moment.patches_moments = kfac_jax.patches_moments_explicit


def _step(network: str, batch: int, kind: str) -> Run:
    """Return the run of a step with learning rate 0; its result is the first gradient."""
    net, periods = NETWORKS[network](), STEPS[kind]
    params = {name: jnp.asarray(from_onnx(weight)) for name, weight in net.weights.items()}
    data = jnp.asarray(images_last(net.inputs(batch)["x"])), jnp.asarray(net.targets(batch))
    value_and_grad = jax.value_and_grad(_loss_of(network))
    plain = jax.jit(value_and_grad)
    gradients = plain(params, data)[1]
    compared = {GRADIENT: [to_onnx(gradients[name]) for name in net.compared]}
    if periods is not None:
        return _kfac_run(value_and_grad, params, data, periods.measured, compared)

    def run_plain() -> Any:
        jax.block_until_ready(plain(params, data))
        return compared

    return run_plain


def _kfac_run(
    value_and_grad: Any, params: Any, data: Any, periods: tuple[int, int], compared: Any
) -> Run:
    optimizer = kfac_jax.Optimizer(
        value_and_grad, l2_reg=0.0, num_burnin_steps=0, estimation_mode="fisher_empirical",
        curvature_ema=DECAY, curvature_update_period=periods[0], inverse_update_period=periods[1],
        include_norms_in_stats=False,
    )  # fmt: skip
    key = jax.random.PRNGKey(0)
    state = optimizer.init(params, key, data)
    # Copies, because the optimizer writes into its arguments.
    params = jax.tree.map(jnp.copy, params)
    still, damping = jnp.asarray(0.0), jnp.asarray(DAMPING)

    def run() -> Any:
        nonlocal params, state
        params, state, _ = optimizer.step(
            params, state, key, batch=data, learning_rate=still, momentum=still, damping=damping
        )
        jax.block_until_ready(params)
        return compared

    # Steps with and without statistics are compiled separately, each at its first call.
    for _ in range(periods[1]):
        run()
    return run


def _loss_of(network: str) -> Callable[[Any, Any], Any]:
    function = FUNCTIONS[network]

    def loss(params: Any, data: Any) -> Any:
        x, y = data
        logits = function(params, x)
        # Each position is a prediction.
        kfac_jax.register_softmax_cross_entropy_loss(
            logits.reshape(-1, logits.shape[-1]), y.reshape(-1)
        )
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1)
        return -picked.mean()

    return loss


OPERATIONS: Mapping[str, Callable[..., Any]] = {"step": _step}
