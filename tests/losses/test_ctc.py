"""CTC equals sums over all paths; its samples have the probabilities of the sequences."""

from collections import defaultdict
from itertools import groupby, product

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.losses import CTCNegativeLogProbLoss
from kfac_engine.losses.ctc import edit_distances
from tests.graph.running import outputs
from tests.models import token_mlp, written
from tests.training_files.parity import differences

FRAMES, CLASSES = 4, 3


def sequences(z, blank):
    """All sequences of labels with their paths: probabilities and shares of classes in frames."""
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    found = defaultdict(lambda: [0.0, np.zeros_like(z)])
    for path in product(range(z.shape[1]), repeat=len(z)):
        entry = found[tuple(label for label, _ in groupby(path) if label != blank)]
        probability = np.prod(p[np.arange(len(z)), path])
        entry[0] += probability
        entry[1][np.arange(len(z)), path] += probability
    return {labels: (total, p - shares / total) for labels, (total, shares) in found.items()}


def padded(labels, width=FRAMES, padding=-1):
    return np.array([[*row, *[padding] * (width - len(row))] for row in labels], np.int64)


@pytest.mark.parametrize("blank", [0, 2])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_loss_and_gradient_equal_the_sum_over_all_paths(blank, scale):
    rng = np.random.default_rng(0)
    for frames in range(1, FRAMES + 1):
        z = scale * rng.standard_normal((frames, CLASSES))
        table = sequences(z, blank)
        every, n = list(table), len(table)
        values = {"z": np.repeat(z[None], n, axis=0), "t": padded(every, frames)}
        loss = CTCNegativeLogProbLoss("z", "t", blank=blank)
        terms, gradient = loss.terms_and_gradient(values, values["t"])
        for k, labels in enumerate(every):
            probability, expected = table[labels]
            # Probabilities of 1e-200 have no more digits in the sum over paths.
            assert terms[k].sum() == pytest.approx(-np.log(probability), rel=1e-9, abs=1e-12)
            np.testing.assert_allclose(gradient["z"][k], expected, atol=1e-12)
        assert loss.value(values) == pytest.approx(-sum(np.log(p) for p, _ in table.values()))


def test_the_axes_of_the_logits_may_have_any_order():
    rng = np.random.default_rng(1)
    z, t = rng.standard_normal((2, FRAMES, CLASSES)), padded([(1, 2), ()])
    expected = CTCNegativeLogProbLoss("z", "t").value_and_gradient({"z": z, "t": t})
    for order in ((1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0)):
        loss = CTCNegativeLogProbLoss(
            "z", "t", batch_axis=order.index(0), class_axis=order.index(2)
        )
        if order.index(2) == 0:
            with pytest.raises(ke.ShapeError):  # classes are on no first axis
                loss.value({"z": z.transpose(order), "t": t})
            continue
        value, gradient = loss.value_and_gradient({"z": z.transpose(order), "t": t})
        assert value == pytest.approx(expected[0])
        np.testing.assert_allclose(gradient["z"], expected[1]["z"].transpose(order))


def test_frames_of_weight_zero_are_left_out_and_others_have_the_weight_of_the_example():
    rng = np.random.default_rng(2)
    z = rng.standard_normal((3, FRAMES, CLASSES))
    frames = np.array([[1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]], bool)
    t = padded([(1,), (2, 1), (1, 1)])
    t[2] = 99  # it is not read
    loss, weights = CTCNegativeLogProbLoss("z", "t"), np.array([3.0, 0.5, 1.0])
    counted = {"z": z, "t": t, "weights of t": frames * weights[:, None]}
    value, gradient = loss.value_and_gradient(counted)
    expected, whole = 0.0, np.zeros_like(z)
    for k in (0, 1):
        probability, score = sequences(z[k][frames[k]], 0)[tuple(t[k][t[k] > 0])]
        expected -= weights[k] * np.log(probability)
        whole[k, frames[k]] = weights[k] * score
    assert value == pytest.approx(expected)
    np.testing.assert_allclose(gradient["z"], whole, atol=1e-12)
    assert loss.observe(counted).total == pytest.approx(3.5)
    by_example = {"z": z, "t": padded([(1,), (2, 1), (1, 2)]), "weights of t": weights}
    alone = [loss.value({"z": z[k : k + 1], "t": by_example["t"][k : k + 1]}) for k in range(3)]
    assert loss.value(by_example) == pytest.approx(np.dot(alone, weights))


@pytest.mark.parametrize("masked", [False, True])
def test_samples_have_the_probabilities_and_the_fisher_matrix_of_all_sequences(masked):
    rng, n = np.random.default_rng(3), 40000
    z = rng.standard_normal((FRAMES, CLASSES))
    frames = np.array([True, False, True, True]) if masked else np.ones(FRAMES, bool)
    table = sequences(z[frames], 0)
    values = {"z": np.repeat(z[None], n, axis=0)}
    if masked:
        values["weights of t"] = np.repeat(frames[None], n, axis=0)
    loss = CTCNegativeLogProbLoss("z", "t")
    drawn = loss.sample(values, np.random.default_rng(0))
    rows, counts = np.unique(drawn, axis=0, return_counts=True)
    observed = {tuple(row[row >= 0]): count / n for row, count in zip(rows, counts, strict=True)}
    for labels, (probability, _) in table.items():
        deviation = np.sqrt(probability * (1 - probability) / n)
        assert abs(observed.get(labels, 0.0) - probability) < 5 * deviation + 1e-12
    scores = loss.gradient_of(values, drawn)["z"][:, frames].reshape(n, -1)
    fisher = sum(p * np.outer(score, score) for p, score in table.values())
    # Entries of the products are below 1, so that a mean has a deviation below 1/√n.
    np.testing.assert_allclose(scores.T @ scores / n, fisher, atol=4 / np.sqrt(n))
    assert np.trace(fisher) <= loss.expected_squares({"z": z[None, frames]})


REFUSED = {
    "another shape": (np.ones((2,), int), None, "the class ids of each example"),
    "real numbers": (np.ones((2, 2)), None, "astype"),
    "no class": (padded([(1, 3), ()]), None, "target 3 of example 0, label 1, is not a class"),
    "the blank": (padded([(1,), (2, 0)]), None, "target 0 of example 1, label 1, is the blank"),
    "a gap": (np.array([[1, -1, 2], [1, 1, -1]]), None, "after padding"),
    "too long": (padded([(1, 1, 2, 2), ()]), None, "example 0 need 6 frames.*but 4"),
    "cut frames": (padded([(1, 2), (1, 2)]), np.array([[1, 1, 1, 1], [1, 0, 0, 0]]), "but 1"),
    "weights of frames": (padded([(1,), ()]), np.array([[1, 2, 0, 0], [1, 1, 1, 1]]), "example 0"),
    "negative weights": (padded([(1,), ()]), np.array([-1.0, 1]), "≥ 0"),
    "shape of weights": (padded([(1,), ()]), np.ones((2, 3)), "one for each frame"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_targets_and_weights_are_refused(case):
    t, weights, message = REFUSED[case]
    values = {"z": np.zeros((2, FRAMES, CLASSES)), "t": t}
    values |= {} if weights is None else {"weights of t": weights}
    with pytest.raises(ke.InputError, match=message):
        CTCNegativeLogProbLoss("z", "t").value(values)


def test_options_and_products_that_do_not_exist_are_refused():
    values = {"z": np.zeros((1, 2, 3))}
    for wrong in (-1, 1.5, "a"):
        with pytest.raises(ke.InputError):
            ke.CTC(blank=wrong)
    with pytest.raises(ke.InputError, match="not a class"):
        CTCNegativeLogProbLoss("z", "t", blank=3).value({**values, "t": padded([(1,)])})
    with pytest.raises(ke.ShapeError, match="three axes"):
        CTCNegativeLogProbLoss("z", "t").value({"z": np.zeros((1, 1, 2, 3)), "t": padded([()])})
    with pytest.raises(ke.UnsupportedError, match="no closed form"):
        CTCNegativeLogProbLoss("z").multiply_fisher(values["z"])(values)
    for mode in ("exact", "curvature_prop"):
        with pytest.raises(ke.UnsupportedError, match="no closed form"):
            ke.Engine.from_onnx(token_mlp(), loss="ctc", estimation_mode=mode)
    for frames in (129, "frames"):
        with pytest.raises(ke.UnsupportedError, match=r"the loss 'ctc'.*compute in Python"):
            ke.differentiate(token_mlp(frames), "ctc")


@pytest.mark.parametrize("weights", [None, "predictions", "examples"])
def test_the_file_of_a_gradient_equals_the_sum_over_all_paths(weights):
    model = token_mlp(FRAMES, (CLASSES, CLASSES), "float64")
    file = ke.differentiate(model, "ctc", wrt="input", weights=weights)
    x, t = np.random.default_rng(7).standard_normal((6, FRAMES, CLASSES)), padded(LABELS)
    of_examples = np.array([1, 2, 0.5, 1, 0, 1.0])
    frames = COUNTING if weights == "predictions" else np.ones((6, FRAMES), bool)
    w = np.ones(6) if weights is None else of_examples
    given = w[:, None] * frames if weights == "predictions" else w
    feeds = {"input": x, "targets": t, **({} if weights is None else {"weights": given})}
    found = outputs(file, feeds)
    parameters = ke.load_model(model).parameters
    matrix = parameters["fc0.weight"]
    z, nats, gradient = x @ matrix + parameters["fc0.bias"], np.zeros(6), np.zeros(x.shape)
    for i, labels in enumerate(LABELS):
        probability, slopes = sequences(z[i, frames[i]], 0)[labels]
        nats[i], gradient[i, frames[i]] = -np.log(probability), w[i] * slopes @ matrix.T
    assert found["loss"] == pytest.approx((w * nats).sum() / w.sum(), rel=1e-9)
    np.testing.assert_allclose(found["gradient/input"], gradient / w.sum(), atol=1e-9)


# -- in an engine ----------------------------------------------------------------------------------

FRAMES_FIRST = "s = MatMul(input, w) output = Transpose<perm=[1,0,2]>(s)"
LABELS = [(1, 2), (2,), (), (1, 1), (2, 1), (1,)]
COUNTING = np.arange(FRAMES) < np.array([4, 2, 1, 3, 4, 2])[:, None]


def batch():
    rng = np.random.default_rng(6)
    return rng.standard_normal((6, FRAMES, 5)).astype("float32"), padded(LABELS, 3), COUNTING


def test_parts_and_weights_of_a_batch_give_the_loss_and_the_gradient_of_the_batch():
    x, t, frames = batch()
    engine = ke.Engine.from_onnx(token_mlp(), loss="ctc")
    whole = engine.gradients(x, ke.Weighted(t, frames))
    z = engine.predict(x).astype("float64")
    nats = [
        -np.log(sequences(row[counting], 0)[labels][0])
        for row, counting, labels in zip(z, frames, LABELS, strict=True)
    ]
    assert whole.loss == pytest.approx(np.mean(nats), rel=1e-5)
    parts = engine.gradients([(x[:2], t[:2], frames[:2]), (x[2:], t[2:], frames[2:])])
    twice = np.concatenate([np.arange(6), [1, 3]])
    copies = engine.gradients(x[twice], ke.Weighted(t[twice], frames[twice]))
    weights = np.array([1, 2, 1, 2, 1, 1.0])[:, None]
    weighted = engine.gradients(x, ke.Weighted(t, frames * weights))
    absent = engine.gradients(x, ke.Weighted(t, np.array([1, 1, 0, 1, 1, 0.0])))
    present = engine.gradients(x[[0, 1, 3, 4]], t[[0, 1, 3, 4]])
    for first, second in ((whole, parts), (copies, weighted), (absent, present)):
        assert first.loss == pytest.approx(second.loss, rel=1e-5)
        for name, gradient in first.gradients.items():
            np.testing.assert_allclose(gradient, second.gradients[name], atol=1e-6)


def test_frames_may_come_before_the_examples():
    x, t, frames = batch()
    wide = {"w": np.random.default_rng(0).standard_normal((5, 3)).astype("float32")}
    models = [
        written("n,4,5 -> n,4,3", "w(5,3)", "output = MatMul(input, w)"),
        written("n,4,5 -> 4,n,3", "w(5,3)", FRAMES_FIRST),
    ]
    found = []
    for model, weights in zip(models, (frames, frames.T), strict=True):
        engine = ke.Engine.from_onnx(model, loss="ctc", seed=3)
        engine.set_parameters(wide)
        step = engine.step(x, ke.Weighted(t, weights))
        metrics = engine.evaluate(
            [(x[:2], t[:2]), (x[2:], t[2:])], ["label_error_rate", "accuracy"]
        )
        found.append((step.loss, metrics, step.gradients["w"], step.natural_gradients["w"]))
    (loss, metrics, *arrays), (other_loss, other_metrics, *others) = found
    assert loss == pytest.approx(other_loss)
    assert metrics == other_metrics
    np.testing.assert_allclose(arrays[0], others[0], atol=1e-6)
    # The random numbers of samples have the order of the logits, so that the samples differ.
    assert np.linalg.norm(arrays[1] - others[1]) < np.linalg.norm(arrays[1])


def test_the_most_probable_path_is_decoded_and_its_edits_are_counted():
    paths = [[1, 1, 0, 1], [0, 2, 2, 0], [2, 1, 1, 2], [0, 0, 0, 0]]
    logits = 9.0 * np.eye(3)[paths]
    decoded = ke.CTC().decode(logits)
    assert decoded.tolist() == [[1, 1, -1], [2, -1, -1], [2, 1, 2], [-1, -1, -1]]
    assert ke.CTC(blank=1).decode(logits[:2]).tolist() == [[0, -1, -1], [0, 2, 0]]
    cut = ke.CTC().decode(logits, np.array([[1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 1, 1], [1] * 4]))
    assert cut.tolist() == [[1, -1], [2, -1], [1, 2], [-1, -1]]
    model = written("n,4,3", "w(3,3)", "output = MatMul(input, w)")
    engine = ke.Engine.from_onnx(model, loss="ctc")
    engine.set_parameters({"w": np.eye(3, dtype="float32")})
    labels = padded([(1, 1), (2, 1), (1, 2), ()])  # 0, 1, 1 and 0 edits
    data = ({"input": logits.astype("float32")}, labels)
    assert set(engine.evaluate(data)) == {"loss", "label_error_rate"}
    found = engine.evaluate(data, ["accuracy", "label_error_rate"])
    assert found == {"accuracy": 0.5, "label_error_rate": pytest.approx(2 / 6)}
    weighted = engine.evaluate((*data, np.array([1, 3, 0, 1.0])), ["accuracy", "label_error_rate"])
    assert weighted == {"accuracy": pytest.approx(2 / 5), "label_error_rate": pytest.approx(3 / 8)}
    with pytest.raises(ke.UnsupportedError, match="no label error rate"):
        ke.Engine.from_onnx(model, loss="normal").evaluate(
            (data[0], logits.astype("float32")), ["label_error_rate"]
        )


def test_edit_distances_equal_the_recursion_of_their_definition():
    def distance(a, b):
        if not a or not b:
            return len(a) + len(b)
        changed = distance(a[1:], b[1:]) + (a[0] != b[0])
        return min(changed, distance(a[1:], b) + 1, distance(a, b[1:]) + 1)

    rng = np.random.default_rng(4)
    for width, other in ((1, 1), (4, 5), (6, 3), (5, 0)):
        pairs = [
            [tuple(rng.integers(0, 3, rng.integers(0, size + 1))) for size in (width, other)]
            for _ in range(40)
        ]
        lengths = np.array([len(b) for _, b in pairs])
        first, second = padded([a for a, _ in pairs], width), padded([b for _, b in pairs], other)
        expected = [distance(a, b) for a, b in pairs]
        assert edit_distances(first, second, lengths).tolist() == expected


def test_verify_passes_and_the_command_trains(tmp_path, capsys):
    x, t, frames = batch()
    report = ke.verify(token_mlp(), {"input": x}, ke.Weighted(t, frames), loss="ctc")
    assert report.passed, report
    model, data = tmp_path / "net.onnx", tmp_path / "data.npz"
    model.write_bytes(token_mlp().SerializeToString())
    np.savez(data, input=x, targets=t, weights=frames)
    arguments = [str(model), f"--data={data}", "--loss=ctc", "--epochs=2"]
    assert main(["train", *arguments, "-o", str(tmp_path / "out.onnx")]) == 0
    assert "label_error_rate" not in capsys.readouterr().err


def draw(rng, n):
    """Sequences in the form of a training file: as many labels as frames."""
    lengths = rng.integers(0, 3, n)
    return padded([tuple(rng.integers(1, CLASSES, length)) for length in lengths])


def with_frames(rng, n):
    frames = np.arange(FRAMES) < rng.integers(3, FRAMES + 1, n)[:, None]
    return ke.Weighted(draw(rng, n), frames)


def with_weights(rng, n):
    weights = rng.integers(0, 3, n).astype("float32")
    weights[0] = 1
    return ke.Weighted(draw(rng, n), weights)


@pytest.mark.parametrize("optimizer", ["kfac", "adamw"])
@pytest.mark.parametrize(
    ("targets", "inputs"),
    [(draw, {}), (with_frames, {"mask": "predictions"}), (with_weights, {"weights": "examples"})],
    ids=["targets", "mask of frames", "weights of examples"],
)
def test_steps_of_training_files_equal_those_of_the_optimizer(targets, inputs, optimizer, tmp_path):
    found = differences(token_mlp(), optimizer, tmp_path, targets, "ctc", steps=8, **inputs)
    assert found[0] < 1e-5
    assert found[-1] < 1e-3


def test_a_training_file_leaves_impossible_targets_out_and_refuses_what_it_cannot_write(tmp_path):
    files = ke.export_training(token_mlp(), "ctc", "adamw", path=tmp_path / "files")
    x, state = np.zeros((2, FRAMES, 5), "float32"), files.initial()
    for wrong in (padded([(1, 1, 2, 2), ()]), padded([(1, 9), ()]), np.array([[1, -1, 2, -1]] * 2)):
        assert not files.step(state, {"input": x}, wrong)["finite"]
    possible = {"input": x}, padded([(1, 2, 1, 2), ()])
    assert files.step(state, *possible)["finite"]
    expected = ke.Engine.from_onnx(token_mlp(), loss="ctc").evaluate(possible)
    assert files.evaluate(state, [possible]) == pytest.approx(expected, rel=1e-5)
    first = written("n,4,5 -> 4,n,3", "w(5,3)", FRAMES_FIRST)
    with pytest.raises(ke.UnsupportedError, match="examples on the first axis"):
        ke.export_training(first, "ctc", "adamw", path=tmp_path / "first")
    with pytest.raises(ke.UnsupportedError, match=r"unrolls the recursions.*has 200"):
        ke.export_training(token_mlp(200), "ctc", "adamw", path=tmp_path / "long")
