"""CTC of torch in double precision: empty targets, repeats, lengths at the bound, cut frames."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kfac_engine.losses import CTCNegativeLogProbLoss  # noqa: E402 (torch is optional)


def draw_labels(rng, frames, blank, classes):
    """A sequence that fits the frames, often as long as they allow."""
    others = [label for label in range(classes) if label != blank]
    labels = rng.choice(others, rng.integers(0, frames + 1))
    while len(labels) + (labels[1:] == labels[:-1]).sum() > frames:
        labels = labels[:-1]
    return labels


def test_loss_and_gradient_of_500_random_cases_equal_those_of_torch():
    rng = np.random.default_rng(0)
    at_bound = empty = 0
    for _ in range(500):
        n, frames, classes = rng.integers(1, 5), rng.integers(1, 12), rng.integers(2, 7)
        blank = int(rng.integers(classes))
        z = rng.choice([0.1, 1, 10, 100]) * rng.standard_normal((n, frames, classes))
        counting = rng.integers(1, frames + 1, n)
        labels = [draw_labels(rng, count, blank, classes) for count in counting]
        targets = np.full((n, frames), -1)
        for row, sequence in zip(targets, labels, strict=True):
            row[: len(sequence)] = sequence
        lengths = np.array([len(sequence) for sequence in labels])
        repeats = np.array([(row[1:] == row[:-1]).sum() for row in labels])
        at_bound += (lengths + repeats == counting).sum()
        empty += (lengths == 0).sum()
        loss = CTCNegativeLogProbLoss("z", "t", blank=blank)
        mask = np.arange(frames) < counting[:, None]
        value, gradient = loss.value_and_gradient({"z": z, "t": targets, "weights of t": mask})
        logits = torch.tensor(z, requires_grad=True)
        expected = torch.nn.functional.ctc_loss(
            logits.log_softmax(2).transpose(0, 1),
            torch.tensor(np.maximum(targets, 0)),
            torch.tensor(counting),
            torch.tensor(lengths),
            blank=blank,
            reduction="sum",
        )
        expected.backward()
        assert value == pytest.approx(expected.item(), rel=1e-12, abs=1e-12)
        np.testing.assert_allclose(gradient["z"], logits.grad.numpy(), atol=1e-11)
    assert min(at_bound, empty) > 50
