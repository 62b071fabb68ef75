"""Losses that both exporters of torch write into a file: value and gradients of torch."""

import io
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

import kfac_engine as ke  # noqa: E402 (torch is optional)

CLASSES, POSITIONS = 4, 6
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 1.0])


def shifted(z, t):
    """The loss of a language model: each position predicts the next one."""
    rows = z[:, :-1].reshape(-1, CLASSES)
    return F.cross_entropy(rows, t[:, 1:].reshape(-1), ignore_index=1)


# Of logits and labels; labels of positions, of examples, or real numbers.
LOSSES = {
    "cross_entropy": ("classes", F.cross_entropy),
    "weights": ("classes", lambda z, t: F.cross_entropy(z, t, weight=WEIGHTS, ignore_index=2)),
    "sum": ("classes", lambda z, t: F.cross_entropy(z, t, reduction="sum")),
    "nll": ("classes", lambda z, t: F.nll_loss(F.log_softmax(z, -1), t, ignore_index=0)),
    "gather": (
        "classes", lambda z, t: -F.log_softmax(z, -1).gather(-1, t[:, None]).squeeze(-1).mean()),
    "flattened": ("positions", lambda z, t: F.cross_entropy(z.reshape(-1, CLASSES), t.reshape(-1))),
    "shifted": ("positions", shifted),
    "mse": ("numbers", F.mse_loss),
    "mse, sum": ("numbers", lambda z, t: F.mse_loss(z, t, reduction="sum")),
    "sigmoid": ("numbers", F.binary_cross_entropy_with_logits),
    "sigmoid, sum": (
        "numbers", lambda z, t: F.binary_cross_entropy_with_logits(z, t, reduction="sum")),
    "by hand": ("numbers", lambda z, t: ((z - t) ** 2).mean()),
}  # fmt: skip


class Model(torch.nn.Module):
    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.last = torch.nn.Linear(5, 7), torch.nn.Linear(7, CLASSES)
        self.loss = loss

    def forward(self, x, t):
        return self.loss(self.last(torch.tanh(self.hidden(x))), t)


def data(kind, n, seed=0):
    torch.manual_seed(seed)
    shape = (n, POSITIONS) if kind == "positions" else (n,)
    labels = torch.rand(n, CLASSES) if kind == "numbers" else torch.randint(0, CLASSES, shape)
    return torch.randn(*shape, 5), labels


def exported(model, arguments, exporter):
    file, names = io.BytesIO(), {"input_names": ["x", "t"], "output_names": ["loss"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter == "dynamo":
            n = torch.export.Dim("n")
            program = torch.onnx.export(
                model, arguments, dynamo=True, dynamic_shapes=({0: n}, {0: n}), verbose=False,
                **names,
            )  # fmt: skip
            return program.model_proto
        axes = {"x": {0: "n"}, "t": {0: "n"}}
        torch.onnx.export(model, arguments, file, dynamo=False, dynamic_axes=axes, **names)
    return file.getvalue()


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_in_a_file_is_that_of_torch(name, exporter):
    kind, loss = LOSSES[name]
    model = Model(loss)
    engine = ke.Engine.from_onnx(exported(model, data(kind, 3), exporter), loss="output", threads=1)
    x, t = data(kind, 8, seed=1)
    value = model(x, t)
    value.backward()
    result = engine.gradients({"x": x.numpy()}, t.numpy())
    assert any("is a loss; it is computed from" in note for note in result.notes)
    assert result.loss == pytest.approx(float(value), rel=1e-5)
    expected = {p.grad.numpy().tobytes(): p.grad.numpy() for p in model.parameters()}
    for gradient in result.gradients.values():
        # Exporters rename weights, and transpose those of products over positions.
        same = [
            array
            for array in expected.values()
            if array.size == gradient.size and sorted(array.shape) == sorted(gradient.shape)
        ]
        distances = [abs((a if a.shape == gradient.shape else a.T) - gradient).max() for a in same]
        assert min(distances) < 1e-5 * max(1.0, float(value))
    assert len(result.gradients) == 4


def test_an_absolute_error_is_trained_as_it_is():
    model = Model(F.l1_loss)
    x, t = data("numbers", 8, seed=1)
    file = exported(model, data("numbers", 3), "dynamo")
    inputs = {"x": x.numpy(), "t": t.numpy()}
    engine = ke.Engine.from_onnx(file, loss="output", sample_inputs=inputs, threads=1)
    assert engine.loss(inputs) == pytest.approx(float(model(x, t)), rel=1e-5)
    before = float(model(x, t))
    optimizer = ke.AdamW(engine, 0.01)
    losses = [optimizer.step(inputs).loss for _ in range(20)]
    assert losses[0] == pytest.approx(before, rel=1e-5)
    assert losses[-1] < 0.9 * losses[0]
    np.testing.assert_array_less(losses[-1], losses[0])
