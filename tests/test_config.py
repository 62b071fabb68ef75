"""Records of choices: what they take and what they refuse."""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest

import kfac_engine as ke

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
        ("normalize_damping_power", NAN),
        ("normalize_damping_power", INFINITE),
        ("eigenvalue_clipping_threshold", NAN),
        ("eigendecomposition_threshold", 0),
        ("eigendecomposition_threshold", 2.5),
        ("inputs_to_extract_patches_factor", 0.0),
        ("inputs_to_extract_patches_factor", 1.1),
        ("inputs_to_extract_patches_factor", NAN),
        ("max_num_patches", 0),
        ("max_num_patches", 1e7),
        ("max_num_patches_per_dimension", 0.0),
        ("max_num_patches_per_dimension", NAN),
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
