"""Use the log-likelihood of an ONNX file in JAX, with its gradient, and sample its posterior.

    python examples/jax_likelihood.py

`onnx_function` makes a differentiable function of JAX from any ONNX file of real numbers with one
output. Its gradient is another file, which `ke.differentiate` writes.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
from onnx import parser

import kfac_engine as ke


def onnx_function(model: onnx.ModelProto) -> Callable[..., jax.Array]:
    """Return the output of a model as a function of its inputs, which has a gradient."""
    run = onnxruntime.InferenceSession(model.SerializeToString())
    names = [entry.name for entry in run.get_inputs()]
    (output,) = [entry.name for entry in run.get_outputs()]
    gradient_file = ke.differentiate(model, output=output, wrt=names)
    run_gradient = onnxruntime.InferenceSession(gradient_file.SerializeToString())

    def compute(*inputs: jax.Array) -> np.ndarray:
        feeds = dict(zip(names, map(np.asarray, inputs), strict=True))
        return run.run([output], feeds)[0]

    def compute_gradients(cotangent: jax.Array, *inputs: jax.Array) -> list[np.ndarray]:
        values = map(np.asarray, (*inputs, cotangent))
        feeds = dict(zip([*names, "cotangent"], values, strict=True))
        return run_gradient.run([f"gradient/{name}" for name in names], feeds)

    @jax.custom_vjp
    def function(*inputs: jax.Array) -> jax.Array:
        sample = compute(*(np.zeros(value.shape, value.dtype) for value in inputs))
        shape = jax.ShapeDtypeStruct(sample.shape, sample.dtype)
        return jax.pure_callback(compute, shape, *inputs, vmap_method="sequential")

    def forward(*inputs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return function(*inputs), inputs

    def backward(inputs: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, ...]:
        shapes = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in inputs]
        found = jax.pure_callback(
            compute_gradients, shapes, cotangent, *inputs, vmap_method="sequential"
        )
        return tuple(found)

    function.defvjp(forward, backward)
    return function


# %% The log-likelihood of each observation y at x, of a line with normal errors.
likelihood = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
line (float[2] theta, float[n] x, float[n] y) => (float[n] log_p) {
  half = Constant <value_float = -0.5> ()
  slope, offset = Split <axis = 0, num_outputs = 2> (theta)
  rise = Mul (slope, x)
  mean = Add (rise, offset)
  error = Sub (y, mean)
  square = Mul (error, error)
  log_p = Mul (half, square)
}""")
random = np.random.default_rng(0)
x = random.normal(size=50).astype(np.float32)
y = (2 * x - 1 + random.normal(size=50)).astype(np.float32)
log_likelihood = onnx_function(likelihood)


def log_posterior(theta: jax.Array) -> jax.Array:
    """Return the log-density of the parameters, up to a constant; the prior is flat."""
    return log_likelihood(theta, x, y).sum()


# %% Hamiltonian Monte Carlo.
@jax.jit
def leapfrog(theta: jax.Array, momentum: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Move along the gradient of the log-density with a momentum."""
    slope = jax.grad(log_posterior)
    for _ in range(4):
        momentum = momentum + 0.04 * slope(theta)
        theta = theta + 0.08 * momentum
        momentum = momentum + 0.04 * slope(theta)
    return theta, momentum


theta, draws = jnp.zeros(2), []
for _ in range(300):
    momentum = random.normal(size=2).astype(np.float32)
    proposed, after = leapfrog(theta, jnp.asarray(momentum))
    gain = log_posterior(proposed) - log_posterior(theta)
    gain += 0.5 * (momentum @ momentum - after @ after)
    theta = proposed if np.log(random.random()) < gain else theta
    draws.append(np.asarray(theta))
draws = np.array(draws[20:])
mean, spread = draws.mean(axis=0), draws.std(axis=0)
print(f"slope {mean[0]:.2f} ± {spread[0]:.2f}, offset {mean[1]:.2f} ± {spread[1]:.2f}")
