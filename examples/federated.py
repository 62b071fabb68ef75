"""Federated averaging: four clients train on digits of their own, with ONNX Runtime alone.

In each round a client takes five steps on its digits and returns its weights; the server averages
them. The digits stay where they are. Clients need the files of ``export_training`` and ONNX
Runtime, in any language; each keeps the state of its optimizer.
"""

import tempfile
from pathlib import Path

import numpy as np
import onnxruntime

import kfac_engine as ke
from kfac_engine.data import demo_model, digits

CLIENTS, ROUNDS, STEPS, BATCH = 4, 12, 5, 64


class Client:
    """A device: it has training files and digits, and no other library than ONNX Runtime."""

    def __init__(self, folder: Path, images: np.ndarray, labels: np.ndarray, seed: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.trainer = onnxruntime.InferenceSession(folder / "training.onnx", options)
        first = onnxruntime.InferenceSession(folder / "initial.onnx", options)
        names = [output.name for output in first.get_outputs()]
        self.state = dict(zip(names, first.run(None, {}), strict=True))
        self.outputs = [output.name for output in self.trainer.get_outputs()]
        self.images, self.labels, self.rng = images, labels, np.random.default_rng(seed)

    def train(self, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Take steps from the weights of the server; return the new weights."""
        self.state |= weights
        for _ in range(STEPS):
            chosen = self.rng.choice(len(self.labels), BATCH, replace=False)
            batch = {"image": self.images[chosen], "targets": self.labels[chosen]}
            feeds = {**batch, "rate": np.array(1, np.float32), **self.state}
            results = dict(zip(self.outputs, self.trainer.run(None, feeds), strict=True))
            new = {name: results[f"new {name}"] for name in self.state}
            self.state |= {name: array for name, array in new.items() if array.size}
        return {name: self.state[name] for name in weights}


def run(optimizer: str, **options: float) -> list[float]:
    """Return the held-out loss after each round."""
    images, labels = digits()
    order = np.random.default_rng(0).permutation(len(labels))
    held_out, parts = order[1400:], np.array_split(order[:1400], CLIENTS)
    with tempfile.TemporaryDirectory() as folder:
        files = ke.export_training(demo_model("cnn"), optimizer=optimizer, path=folder, **options)
        clients = [
            Client(Path(folder), images[part], labels[part], seed)
            for seed, part in enumerate(parts)
        ]
        weights, losses = files.read(files.initial()), []
        for _ in range(ROUNDS):
            returned = [client.train(weights) for client in clients]
            weights = {name: np.mean([w[name] for w in returned], axis=0) for name in weights}
            logits = files.predict(weights, {"image": images[held_out]})["logits"]
            shifted = logits - logits.max(axis=1, keepdims=True)
            log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
            losses.append(-float(log_p[np.arange(len(held_out)), labels[held_out]].mean()))
    return losses


for optimizer, options in (("kfac", {}), ("adamw", {"learning_rate": 0.003})):
    print(optimizer, *(f"{loss:.3f}" for loss in run(optimizer, **options)))
