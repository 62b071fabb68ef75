"""Steps of PyTorch's AdamW on an exported module, for the suite ``models``."""

from pathlib import Path
from time import process_time

import torch
from torch.nn.functional import cross_entropy

from kfac_engine.bench.models import RATE, STEPS, Answer, batch_of
from kfac_engine.engine.profiling import forget_peak, peak_bytes, resident_bytes


def measure(path: str) -> Answer:
    """Return CPU seconds, losses and memory of steps in this process."""
    arrays, targets = batch_of(Path(path))
    inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    labels = torch.from_numpy(targets)
    before, start = resident_bytes(), process_time()
    module = _loaded(Path(path).with_suffix(".pt2"))
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
    build = process_time() - start
    forget_peak()
    seconds, losses = [], []
    for _ in range(STEPS):
        start = process_time()
        optimizer.zero_grad()
        logits = module(**inputs)
        # Classes of tokens are on the last axis, those of pixels on the second.
        loss = cross_entropy(logits.transpose(1, -1) if logits.ndim == 3 else logits, labels)
        loss.backward()
        optimizer.step()
        seconds.append(process_time() - start)
        losses.append(loss.item())
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return Answer(parameters, build, seconds, losses, 0, max(0, peak_bytes() - before))


def _loaded(path: Path) -> torch.nn.Module:
    """Return a module whose weights with several names are one parameter, as before the export."""
    module, known = torch.export.load(path).module(), dict[int, torch.nn.Parameter]()
    for name, parameter in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        one = known.setdefault(parameter.data_ptr(), parameter)
        setattr(module.get_submodule(owner), leaf, one)
    return module
