"""Records of choices: what they take and what they refuse."""

import re
from dataclasses import FrozenInstanceError
from inspect import signature
from pathlib import Path

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.cli.precondition import run_precondition
from kfac_engine.data import demo_model
from tests import models

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"debias": False, "initial_covariance": "identity"},
        {"pi_type": "off", "normalize_damping_power": 0.0},
        {"normalize_damping_power": -1.0, "eigenvalue_clipping_threshold": 1e-8},
        {"eigendecomposition_threshold": 1, "seed": np.int64(3)},
        {"sub_sample_inputs": True, "inputs_to_extract_patches_factor": 1.0},
        {"sub_sample_patches": True, "max_num_patches": 1, "max_num_patches_per_dimension": 0.1},
    ],
    ids=str,
)
def test_choices_within_their_ranges_are_kept(choices):
    config = ke.CollectionConfig(**choices)
    assert {name: getattr(config, name) for name in choices} == choices


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("initial_covariance", "ones"),
        ("pi_type", "trace"),
        ("debias", "no"),
        ("sub_sample_inputs", 1),
        ("normalize_damping_power", NAN),
        ("normalize_damping_power", "1"),
        ("normalize_damping_power", INFINITE),
        ("eigenvalue_clipping_threshold", NAN),
        ("eigendecomposition_threshold", 0),
        ("eigendecomposition_threshold", 2.5),
        ("inputs_to_extract_patches_factor", 0.0),
        ("inputs_to_extract_patches_factor", 1.1),
        ("inputs_to_extract_patches_factor", NAN),
        ("inputs_to_extract_patches_factor", "all"),
        ("max_num_patches", 0),
        ("max_num_patches", 1e7),
        ("max_num_patches_per_dimension", 0.0),
        ("max_num_patches_per_dimension", NAN),
        ("max_num_patches_per_dimension", None),
        ("seed", -1),
        ("seed", 0.5),
        ("seed", None),
    ],
)
def test_a_choice_outside_its_range_is_refused_by_name_and_value(name, value):
    with pytest.raises(ke.InputError, match=name) as caught:
        ke.CollectionConfig(**{name: value})
    assert str(value) in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("covariance_every", 0),
        ("covariance_every", 1.5),
        ("refresh_every", -3),
        ("refresh_every", NAN),
        ("refresh_every", "10"),
        ("policy", "sometimes"),
    ],
)
def test_a_schedule_takes_positive_whole_periods_and_a_known_policy(name, value):
    with pytest.raises(ke.InputError, match=name) as caught:
        ke.Schedule(**{name: value})
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("record", "field"), [(ke.CollectionConfig(), "seed"), (ke.Schedule(), "refresh_every")]
)
def test_records_cannot_be_changed_and_compare_by_value(record, field):
    assert record == type(record)()
    assert hash(record) == hash(type(record)())
    with pytest.raises(FrozenInstanceError):
        setattr(record, field, 1)


# What each call does where nothing is said: numbers that results hang on.
DEFAULTS = {
    ke.CollectionConfig: {
        "debias": True,
        "initial_covariance": "zeros",
        "pi_type": "tracenorm",
        "normalize_damping_power": 1.0,
        "eigenvalue_clipping_threshold": 0.0,
        "eigendecomposition_threshold": 4,
        "assume_zero_mean_activations": False,
        "subtract_mean_contrib_from_cov": True,
        "sub_sample_inputs": False,
        "inputs_to_extract_patches_factor": 0.2,
        "sub_sample_patches": False,
        "max_num_patches": 10_000_000,
        "max_num_patches_per_dimension": 3.0,
        "seed": 0,
    },
    ke.Schedule: {
        "covariance_every": 1,
        "refresh_every": 10,
        "policy": "all_at_once",
        "overlap": False,
    },
    ke.Engine.from_onnx: {
        "output": None,
        "class_axis": -1,
        "reduction": "mean",
        "trainable": None,
        "damping": 1e-3,
        "ema_decay": 0.95,
        "estimation_mode": "gradients",
        "exps": (-1,),
        "approximations": None,
        "schedule": None,
        "threads": None,
        "backend": "auto",
        "seed": 0,
    },
    ke.Result.clipped_rate: {"learning_rate": 1.0, "kl_clip": 0.003},
}


@pytest.mark.parametrize("of", DEFAULTS, ids=lambda of: of.__qualname__)
def test_defaults_are_those_that_are_promised(of):
    parameters = signature(of).parameters
    found = {name: parameters[name].default for name in DEFAULTS[of]}
    assert found == DEFAULTS[of]
    assert {name: type(value) for name, value in found.items()} == {
        name: type(value) for name, value in DEFAULTS[of].items()
    }


def test_an_engine_has_the_defaults_where_nothing_is_said():
    engine = ke.Engine.from_onnx(models.mlp(), loss="categorical")
    assert engine.schedule == ke.Schedule()
    assert (engine.estimator.damping, engine.estimator.cov_ema_decay) == (1e-3, 0.95)
    assert engine.collection.config == ke.CollectionConfig()


def test_the_page_about_training_and_the_command_line_have_the_same_defaults():
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    (loop,) = re.findall(r"^## Train in a loop of your own\n(.*?)^## ", page, re.M | re.S)
    rows = re.findall(r"^\| `(?:Schedule\.)?(\w+)` \| (\S+) \| (.*) \|$", loop, re.M)
    told = {name: float(value) for name, value, _ in rows}
    promised = {name: value for choices in DEFAULTS.values() for name, value in choices.items()}
    assert told == {name: promised[name] for name in told}
    assert {"damping", "ema_decay", "covariance_every", "refresh_every"} <= told.keys()
    options = {option.name: option.default for option in run_precondition.params}
    for name, _, where in rows:
        if "--" in where:
            assert options[name] == promised[name]


def test_the_page_about_training_has_the_defaults_of_the_optimizer():
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    (options,) = re.findall(r"^### The options of KfacOptimizer\n(.*?)^##", page, re.M | re.S)
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", options, re.M))
    optimizer = ke.KfacOptimizer(ke.Engine.from_onnx(demo_model("mlp"), loss="categorical"))
    defaults = optimizer.options | {n: getattr(optimizer, n) for n in ("damping", "weight_decay")}
    defaults["momentum"] = optimizer._given.momentum  # the option is None
    assert len(rows) >= 8
    assert {name: float(value) for name, value in rows.items()} == {
        name: defaults[name] for name in rows
    }
