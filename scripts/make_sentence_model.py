"""Write docs/tutorials/sentences.onnx: a small BERT, pretrained on the sentences of a tutorial.

Run: ``python -m scripts.make_sentence_model``, where torch, onnxscript and transformers are
installed. The page on fine-tuning defines the sentences and the export.
"""

import contextlib
import re
import tempfile
from pathlib import Path
from typing import Any

import onnx

FOLDER = Path(__file__).resolve().parent.parent / "docs/tutorials"
MODEL = FOLDER / "sentences.onnx"
_STEPS, _BATCH = 400, 64


def block(containing: str) -> str:
    """Return the block of the page that contains a text."""
    text = (FOLDER / "fine_tune.md").read_text(encoding="utf-8")
    (code,) = (
        code
        for code in re.findall(r"^```python[^\n]*\n(.*?)^```", text, re.M | re.S)
        if containing in code
    )
    return code


def pretrain(folder: Path, steps: int = _STEPS) -> float:
    """Write a BERT that predicts the verb of the second half of a sentence from the first half.

    Return the mean cross entropy in the last hundred batches. The second half has one of three
    verbs with equal probabilities, so that no model is below log 3 = 1.099 on average.
    """
    import numpy as np
    import torch

    page: dict[str, Any] = {"print": lambda *texts, **options: None}
    exec(compile(block("def sentence"), "fine_tune.md", "exec"), page)
    adjectives, verbs = page["good"] + page["bad"], page["verbs"]
    torch.manual_seed(0)
    random = np.random.default_rng(2)
    model = untrained(len(page["vocabulary"]))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    losses = []
    for _ in range(steps):
        texts, praise = zip(
            *(page["sentence"](random, adjectives) for _ in range(_BATCH)), strict=True
        )
        follows = [3 * is_praise + random.integers(len(verbs[is_praise])) for is_praise in praise]
        inputs = {name: torch.from_numpy(array) for name, array in page["encode"](texts).items()}
        optimizer.zero_grad()
        loss = model(**inputs, labels=torch.tensor(follows)).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.save_pretrained(folder)
    return sum(losses[-100:]) / len(losses[-100:])


def untrained(words: int) -> Any:
    """Return a BERT with random weights for a number of words, which predicts one of six verbs."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=words,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=12,
            num_labels=6,
            initializer_range=0.15,  # the default of 0.02 is for larger widths
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="eager",
        )
    )


def export(folder: Path) -> Path:
    """Execute the export of the page in the folder that has the pretrained model."""
    with contextlib.chdir(folder):
        exec(compile(block("torch.onnx.export"), "fine_tune.md", "exec"), {})
    path = folder / "sentences.onnx"
    onnx.save(_without_traces(onnx.load(path)), path)
    return path


def _without_traces(model: onnx.ModelProto) -> onnx.ModelProto:
    """Remove the stack traces of the exporter, which are five sixths of a small file."""
    graph = model.graph
    described = (model, graph, *graph.node, *graph.initializer, *graph.input, *graph.output)
    for entry in described:
        del entry.metadata_props[:]
    del graph.value_info[:]
    return model


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print(f"cross entropy of verbs: {pretrain(Path(name) / 'sentences'):.3f}")
        MODEL.write_bytes(export(Path(name)).read_bytes())
    print(f"{MODEL.stat().st_size} bytes")
