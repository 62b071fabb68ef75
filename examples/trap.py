"""Find the energy of the ground state of particles in a trap, which springs connect.

    python examples/trap.py 500

The argument is a number of steps. A network computes log ψ of the wave function ψ from the places
of the particles. Variational Monte Carlo lowers the mean of the local energy Hψ/ψ over places drawn
from ψ². The energy of this system is known, and the example prints it too.
"""

import sys

import numpy as np
from onnx import numpy_helper, parser

import kfac_engine as ke

PARTICLES, SPRING, WALKERS, UNITS = 4, 0.5, 256, 24
# The centre of mass moves with the frequency 1 of the trap, the other particles move faster.
EXACT = 1.5 * (1 + (PARTICLES - 1) * np.sqrt(1 + PARTICLES * SPRING))
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 120
random = np.random.default_rng(0)

# %% A network with the same value for each order of the particles.
model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
trap (float[n, particles, 3] x) => (float[n, 1] log_psi) {
  centre = ReduceMean <keepdims = 1> (x, particle_axis)
  relative = Sub (x, centre)
  features = Concat <axis = 2> (x, relative)
  m1 = MatMul (features, W1)
  z1 = Add (m1, b1)
  h1 = Tanh (z1)
  m2 = MatMul (h1, W2)
  z2 = Add (m2, b2)
  h2 = Tanh (z2)
  pooled = ReduceMean <keepdims = 0> (h2, particle_axis)
  m3 = MatMul (pooled, W3)
  correction = Add (m3, b3)
  squares = Mul (x, x)
  distance = ReduceSum <keepdims = 0> (squares, place_axes)
  column = Unsqueeze (distance, particle_axis)
  half = Constant <value_float = 0.5> ()
  alone = Mul (half, column)
  log_psi = Sub (correction, alone)
}""")
model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = PARTICLES
arrays = {"particle_axis": np.array([1]), "place_axes": np.array([1, 2])}
for i, (ins, outs) in enumerate([(6, UNITS), (UNITS, UNITS), (UNITS, 1)], start=1):
    arrays[f"W{i}"] = (random.normal(size=(ins, outs)) / np.sqrt(ins)).astype(np.float32)
    arrays[f"b{i}"] = np.zeros(outs, np.float32)
for name, array in arrays.items():
    model.graph.initializer.append(numpy_helper.from_array(array, name))

loss = {"log_psi": ke.Normal(var=1)}
engine = ke.Engine.from_onnx(model, loss=loss)
optimizer = ke.GaussNewton(engine, learning_rate=0.1)
local = ke.Engine.from_onnx(ke.derivatives(model, "x", jacobian=True, laplacian=True), loss=loss)


def walk(x: np.ndarray, moves: int) -> np.ndarray:
    """Move all walkers by Metropolis' rule, which keeps the distribution ψ²."""
    log_psi = engine.predict(x)
    for _ in range(moves):
        proposed = x + 0.3 * random.standard_normal(x.shape, np.float32)
        proposed_log_psi = engine.predict(proposed)
        accepted = np.log(random.random(log_psi.shape)) < 2 * (proposed_log_psi - log_psi)
        x = np.where(accepted[..., None], proposed, x)
        log_psi = np.where(accepted, proposed_log_psi, log_psi)
    return x


def local_energies(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return log ψ and Hψ/ψ = −½ (Δ log ψ + |∇ log ψ|²) + V of each walker, ``(n, 1)``."""
    local.set_parameters(engine.parameters)
    results = local.predict(x)
    slopes = np.square(results["jacobian of log_psi"]).sum(axis=(2, 3))
    from_centre = np.square(x - x.mean(axis=1, keepdims=True)).sum(axis=(1, 2))
    doubled_potential = np.square(x).sum(axis=(1, 2)) + PARTICLES * SPRING * from_centre
    energies = 0.5 * (doubled_potential[:, None] - results["laplacian of log_psi"] - slopes)
    return results["log_psi"], energies


# %% Lower the energy. The loss at these targets has the gradient of the mean energy.
x = walk(random.standard_normal((WALKERS, PARTICLES, 3), np.float32), 50)
print("step    energy  standard deviation of Hψ/ψ")
for step in range(steps):
    x = walk(x, 10)
    log_psi, energies = local_energies(x)
    targets = log_psi - 2 * (energies - energies.mean())
    optimizer.step(x, targets, scale=min(1.0, 2 - 2 * step / steps))
    if (step + 1) % max(1, steps // 6) == 0:
        print(f"{step + 1:4}  {energies.mean():8.4f}  {energies.std():8.4f}")

# %% Measure it. Means of long blocks of successive samples are nearly independent.
means = np.empty((10, 10))
for index in np.ndindex(means.shape):
    x = walk(x, 10)
    means[index] = local_energies(x)[1].mean()
blocks = means.mean(axis=1)
energy, error = blocks.mean(), blocks.std(ddof=1) / np.sqrt(len(blocks))
print(f"energy {energy:.4f} ± {error:.4f}, exact {EXACT:.4f}")
