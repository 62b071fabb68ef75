"""Federated averaging: four devices train on digits of their own, with ONNX Runtime alone.

In each round a device takes five steps on its digits and returns its weights; the server averages
them. The digits stay where they are, and so does the state of the optimizer. With ``factors``, the
Kronecker factors of K-FAC are averaged as well. ``flower`` has the same over a network.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import kfac_engine as ke
from kfac_engine.data import demo_model, digits

sys.path.insert(0, str(Path(__file__).resolve().parent / "flower"))
from device import Device, batches_of, evaluate, split

DEVICES, ROUNDS, STEPS, BATCH, TRAIN = 4, 8, 5, 64, 1400


def run(optimizer: str, *, factors: bool = False, skewed: bool = False, **options: float) -> list:
    """Return the held-out loss after each round; skewed devices have two to four classes each."""
    images, labels = digits()
    order = np.random.default_rng(0).permutation(len(labels))
    data = {"image": images[order], "targets": labels[order]}
    train, held_out = (
        {n: a[k] for n, a in data.items()} for k in np.split(np.arange(len(labels)), [TRAIN])
    )
    parts = [
        {name: array[part] for name, array in train.items()}
        for part in split(train["targets"], DEVICES, skewed)
    ]
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        ke.export_training(demo_model("cnn"), optimizer=optimizer, path=folder, **options)
        devices = [Device(folder, factors) for _ in range(DEVICES)]
        shared = {name: devices[0].state[name] for name in devices[0].shared}
        losses = []
        for number in range(ROUNDS):
            returned = [
                device.train(shared, batches_of(own, STEPS, BATCH, 1000 * i + STEPS * number))
                for i, (device, own) in enumerate(zip(devices, parts, strict=True))
            ]
            shared = {
                name: np.mean([arrays[name] for arrays in returned], axis=0, dtype=np.float32)
                for name in shared
            }
            losses.append(evaluate(folder, shared, held_out)["loss"])
    return losses


RUNS = (
    ("AdamW", "adamw", {"learning_rate": 0.003}),
    ("K-FAC", "kfac", {}),
    ("K-FAC, factors averaged", "kfac", {"factors": True}),
)
results = {
    (name, skewed): run(optimizer, skewed=skewed, **options)
    for skewed in (False, True)
    for name, optimizer, options in RUNS
}
for (name, skewed), losses in results.items():
    classes = "few classes each" if skewed else "all classes"
    print(f"{classes:16} {name:24}", *(f"{loss:.3f}" for loss in losses))
