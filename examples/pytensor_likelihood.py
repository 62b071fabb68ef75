"""Use the log-likelihood of an ONNX file in PyTensor, with its gradient.

    python examples/pytensor_likelihood.py

`OnnxOp` is an Op for any ONNX file of real numbers with one output. Its gradient is another file,
which `ke.differentiate` writes. PyMC samples from models with such an Op. The example needs
PyTensor 3.
"""

import numpy as np
import onnxruntime
import pytensor
import pytensor.tensor as pt
from onnx import parser
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op

import kfac_engine as ke


class OnnxOp(Op):
    """An ONNX file as a function; all inputs are real numbers."""

    def __init__(self, model: bytes) -> None:
        self.model = model
        self.session = onnxruntime.InferenceSession(model)
        self.inputs = [entry.name for entry in self.session.get_inputs()]
        self.outputs = [entry.name for entry in self.session.get_outputs()]

    def __reduce__(self) -> tuple[type, tuple[bytes]]:
        return OnnxOp, (self.model,)

    def make_node(self, *inputs: object) -> Apply:
        """Return a node for these inputs."""
        types = [entry.type for entry in self.session.get_outputs()]
        sizes = [len(entry.shape) for entry in self.session.get_outputs()]
        kinds = {"tensor(double)": "float64", "tensor(float)": "float32"}
        results = [
            pt.tensor(dtype=kinds[kind], shape=(None,) * size)
            for kind, size in zip(types, sizes, strict=True)
        ]
        return Apply(self, [pt.as_tensor(value) for value in inputs], results)

    def perform(self, node: Apply, inputs: list[np.ndarray], storage: list[list]) -> None:
        """Run the file."""
        feeds = dict(zip(self.inputs, inputs, strict=True))
        for cell, value in zip(storage, self.session.run(None, feeds), strict=True):
            cell[0] = value

    def pullback(
        self, inputs: list[Variable], outputs: list[Variable], cotangents: list[Variable]
    ) -> list[Variable]:
        """Return the gradients of ⟨cotangents, outputs⟩ with respect to the inputs."""
        (cotangent,) = cotangents
        gradient = ke.differentiate(self.model, output=self.outputs[0], wrt=self.inputs)
        return OnnxOp(gradient.SerializeToString())(*inputs, cotangent)[1:]


# %% The log-likelihood of each observation y at x, of a line with normal errors.
likelihood = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
line (double[2] theta, double[n] x, double[n] y) => (double[n] log_p) {
  half = Constant <value = double {-0.5}> ()
  slope, offset = Split <axis = 0, num_outputs = 2> (theta)
  rise = Mul (slope, x)
  mean = Add (rise, offset)
  error = Sub (y, mean)
  square = Mul (error, error)
  log_p = Mul (half, square)
}""")
random = np.random.default_rng(0)
x = random.normal(size=50)
y = 2 * x - 1 + random.normal(size=50)

theta = pt.dvector("theta")
log_p = OnnxOp(likelihood.SerializeToString())(theta, x, y).sum()
results = [log_p, pytensor.grad(log_p, theta)]
value_and_gradient = pytensor.function([theta], results, mode="FAST_COMPILE")

# %% Newton's method needs the gradient alone here: the Hessian matrix of a line is constant.
gradients = [value_and_gradient(point)[1] for point in np.eye(3, 2, k=-1)]
hessian = np.array(gradients[1:]) - gradients[0]
estimate = np.linalg.solve(hessian, -gradients[0])
print(f"slope {estimate[0]:.4f}, offset {estimate[1]:.4f}")
