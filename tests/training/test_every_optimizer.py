"""What holds for every optimizer: resumed runs, batches that are not finite, wrong options."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

import kfac_engine as ke
from tests.training import softmax_net as net
from tests.training.test_exact_steps import network
from tests.training.test_gauss_newton import optimizer_of, wave
from tests.training.test_kfac import CASES as KFAC

LM = ke.DampingAdaptation(interval=3)
QUADRATIC = {"learning_rate": "quadratic", "momentum": "quadratic"}


def spoiled(x, y):
    x = x.copy()
    x[0, 0] = np.nan
    return x, y


@dataclass(frozen=True)
class Case:
    """An optimizer, and a run whose state is stored after some of its steps."""

    make: Callable[[], ke.KfacOptimizer]
    steps: int = 6
    saved: int = 3
    dtype: str = "float64"
    batch: Callable | None = None  # of a number of the step; None for the softmax classifier
    bad: Sequence[Callable] = (spoiled,)  # from a batch to batches that are not finite

    def data(self, step):
        return self.batch(step) if self.batch else net.batch(step, self.dtype)

    def run(self, optimizer, steps):
        reports = []
        for step in steps:
            x, y = self.data(step)
            scale = 1.0 if 2 * step < self.steps else 0.5
            reports.append(optimizer.step({"x": x}, y, scale))
        return reports


def kfac(mode="exact", **options):
    return lambda: ke.KfacOptimizer(net.engine(estimation_mode=mode), **options)


FIRST_ORDER = {
    "SGD": lambda e: ke.SGD(e, 0.1), "Adam": ke.Adam, "AdamW": ke.AdamW, "Muon": ke.Muon,
}  # fmt: skip
CASES = {
    f"{name} {dtype}": Case(lambda m=make, d=dtype: m(net.engine(d)), dtype=dtype)
    for name, make in FIRST_ORDER.items()
    for dtype in ("float32", "float64")
}
CASES |= {
    f"kfac {name}, {mode}": Case(kfac(mode, **KFAC[name][0]), 70, 17)
    for name in ("auto", "auto, adapted damping", "rate")
    for mode in ("exact", "gradients")
}
CASES |= {
    "kfac quadratic": Case(kfac(adapt_damping=LM, l2=0.001, **QUADRATIC), 20, 13),
    "gauss_newton": Case(
        lambda: optimizer_of(network([1, 6, 1])), batch=lambda step: wave(),
        bad=(spoiled, *(lambda x, y, v=v: (x, np.full_like(y, v)) for v in (np.nan, 1e300))),
    ),
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def state(optimizer, folder):
    optimizer.save(folder / "state")
    return (folder / "state").read_bytes()


@every_case
def test_a_run_resumes_with_equal_bits(case, tmp_path):
    whole, first, second = (case.make() for _ in range(3))
    case.run(whole, range(case.steps))
    case.run(first, range(case.saved))
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    reports = case.run(second, range(case.saved, case.steps))
    for name, value in whole.engine.parameters.items():
        assert value.dtype == case.dtype
        assert np.array_equal(value, second.engine.parameters[name])
    assert state(whole, tmp_path) == state(second, tmp_path)
    assert second.steps == case.steps
    if isinstance(whole, ke.KfacOptimizer):
        assert any(report.refreshed for report in reports)


@every_case
def test_a_batch_that_is_not_finite_changes_nothing(case, tmp_path):
    optimizer = case.make()
    case.run(optimizer, range(3))
    before = state(optimizer, tmp_path)
    for spoil in case.bad:
        x, y = spoil(*case.data(4))
        with pytest.raises(ke.NonFiniteError):
            optimizer.step({"x": x}, y)
        assert state(optimizer, tmp_path) == before
    case.run(optimizer, [3])
    assert state(optimizer, tmp_path) != before


# A class, its wrong options, and what the error says of them.
WRONG = [
    (ke.SGD, {"learning_rate": "fast"}, "learning_rate must be a finite number"),
    (ke.SGD, {"learning_rate": -0.1}, "learning_rate must be at least 0"),
    (ke.SGD, {"learning_rate": 0.1, "momentum": 1.0}, r"momentum must lie in \[0, 1\)"),
    (ke.SGD, {"learning_rate": 0.1, "weight_decay": -1}, "weight_decay must be at least 0"),
    (ke.SGD, {"learning_rate": 0.1, "non_finite": "ignore"}, "non_finite must be one of raise, sk"),
    (ke.Adam, {"betas": (0.9, 1.0)}, "each of betas must lie in"),
    (ke.Adam, {"epsilon": 0}, "epsilon must be a positive number"),
    (ke.Muon, {"adam_rate": None}, "adam_rate must be a finite number"),
    (ke.KfacOptimizer, {"learning_rate": "fast"}, "a number, a function, 'auto' or 'quadratic'"),
    (ke.KfacOptimizer, {"damping": 0}, "damping must be a positive number"),
    (ke.KfacOptimizer, {"momentum": 1}, r"momentum must lie in \[0, 1\)"),
    (ke.KfacOptimizer, {"adapt_damping": "yes"}, "must be True, False or a DampingAdaptation"),
    (ke.KfacOptimizer, {"statistics_part": 1.5}, r"statistics_part must lie in \(0, 1\]"),
    (ke.KfacOptimizer, {"statistics_every": 0}, "statistics_every must be a whole number of at le"),
    (ke.KfacOptimizer, {"refresh_every": 2.5}, "refresh_every must be a whole number"),
    (ke.KfacOptimizer, {"update_length": 0}, "update_length must be a positive number"),
    (ke.KfacOptimizer, {"adam_rate": -1}, "adam_rate must be at least 0"),
    (ke.KfacOptimizer, {"weight_decay": -1}, "weight_decay must be at least 0"),
    (ke.KfacOptimizer, {"momentum": "quadratic"}, "='quadratic' needs learning_rate='quadratic'"),
    (ke.KfacOptimizer, {"momentum": lambda step: 0.5}, "momentum must be a finite number"),
    (ke.KfacOptimizer, {"l2": -1}, "l2 must be at least 0"),
    (ke.KfacOptimizer, {"learning_rate": 1.0, "l2": 0.1}, "0.01 and contains l2, which is 0.1"),
    (ke.GaussNewton, {"damping": 0}, "damping"),
    (ke.GaussNewton, {"damping": 0.1, "l2": 0.2}, "damping is 0.1 and contains l2"),
    (ke.GaussNewton, {"momentum": 1}, "momentum"),
    (ke.GaussNewton, {"l2": -1}, "l2"),
    (ke.GaussNewton, {"learning_rate": "auto"}, "learning_rate"),
    (ke.GaussNewton, {"adapt_damping": "yes"}, "adapt_damping"),
]


@pytest.mark.parametrize(("kind", "options", "message"), WRONG)
def test_a_wrong_option_is_refused(kind, options, message):
    with pytest.raises(ke.InputError, match=message):
        kind(net.engine(), **options)


def test_an_optimizer_needs_an_engine():
    with pytest.raises(ke.InputError, match="an optimizer needs a kfac_engine"):
        ke.SGD("model.onnx", 0.1)
