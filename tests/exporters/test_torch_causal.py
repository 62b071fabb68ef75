"""The loss of a causal language model is that of transformers on the same logits."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: E402 (it is optional)

from kfac_engine.losses import CausalNegativeLogProbLoss  # noqa: E402 (torch is optional)


def test_loss_and_gradient_equal_those_of_transformers():
    rng = np.random.default_rng(0)
    for _ in range(20):
        n, length, tokens = rng.integers(1, 5), rng.integers(2, 9), rng.integers(2, 12)
        z = rng.standard_normal((n, length, tokens)).astype("float32")
        labels = rng.integers(0, tokens, (n, length))
        labels[:, 1:][rng.random((n, length - 1)) < 0.3] = -100
        labels[0, 1] = 0  # one counts
        logits = torch.tensor(z, requires_grad=True)
        expected = ForCausalLMLoss(logits, torch.tensor(labels), vocab_size=int(tokens))
        expected.backward()
        loss, values = CausalNegativeLogProbLoss("z", "t"), {"z": z, "t": labels}
        value, gradient = loss.value_and_gradient(values)
        total = loss.observe(values).total
        # Both are sums of a few terms in float32.
        assert value / total == pytest.approx(expected.item(), rel=1e-5)
        np.testing.assert_allclose(gradient["z"] / total, logits.grad.numpy(), atol=1e-6)
