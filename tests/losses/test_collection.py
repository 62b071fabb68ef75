"""What may be a further tower of a loss, and in which ways."""

import pytest

import kfac_engine as ke

FIRST = {
    "categorical": lambda **options: ke.CategoricalLogitsNegativeLogProbLoss("z", **options),
    "normal": lambda **options: ke.NormalMeanNegativeLogProbLoss("z", **options),
    "variance": lambda **options: ke.NormalMeanNegativeLogProbLoss("z", 2.0, **options),
    "bernoulli": lambda **options: ke.MultiBernoulliNegativeLogProbLoss("z", **options),
    "axis": lambda **options: ke.MultiBernoulliNegativeLogProbLoss("z", class_axis=1, **options),
}


def with_loss(loss, **options):
    collection = ke.LayerCollection()
    collection.register_loss_function(loss, "z", "base", name="loss", **options)
    return collection


@pytest.mark.parametrize("kind", FIRST)
@pytest.mark.parametrize("reuse", [True, "VARIABLE_SCOPE"])
def test_tower_of_same_distribution_may_have_other_names(kind, reuse):
    collection = with_loss(FIRST[kind]())
    tower = FIRST[kind](targets="t")
    collection.register_loss_function(tower, "z", "base", name="loss", reuse=reuse)
    assert collection.losses[1] is tower


@pytest.mark.parametrize(
    ("kind", "other"), [(a, b) for a in FIRST for b in FIRST if a != b], ids=lambda kind: kind
)
@pytest.mark.parametrize("reuse", [True, "VARIABLE_SCOPE"])
def test_tower_of_other_distribution_raises_error(kind, other, reuse):
    collection = with_loss(FIRST[kind]())
    with pytest.raises(ValueError, match="must be of the same distribution"):
        collection.register_loss_function(FIRST[other](), "z", "base", name="loss", reuse=reuse)
    assert len(collection.losses) == 1


@pytest.mark.parametrize("reuse", ["True", "AUTO_REUSE", None, 1])
def test_reuse_has_three_valid_values(reuse):
    collection = with_loss(FIRST["normal"]())
    with pytest.raises(ValueError, match="reuse is True, False or 'VARIABLE_SCOPE'"):
        collection.register_normal_predictive_distribution("z", reuse=reuse)
    with pytest.raises(ValueError, match="reuse is True, False or 'VARIABLE_SCOPE'"):
        collection.register_fully_connected("w", "x", "s", reuse=reuse)
    assert len(collection.losses) == 1
    assert collection.fisher_blocks == {}


@pytest.mark.parametrize("coeff", [-1.0, float("nan"), float("inf")])
def test_invalid_coefficient_raises_error_and_registers_nothing(coeff):
    collection = ke.LayerCollection()
    with pytest.raises(ValueError, match="must be finite and not negative"):
        collection.register_normal_predictive_distribution("z", coeff=coeff)
    assert collection.losses == ()
    assert collection.register_normal_predictive_distribution("z") == (
        "normal_predictive_distribution"
    )


def test_batch_value_is_first_input_of_first_loss():
    collection = ke.LayerCollection()
    assert collection.batch_value is None
    collection.register_loss_function(
        ke.NormalMeanVarianceNegativeLogProbLoss("mean", "variance"), "mean", "base"
    )
    collection.register_normal_predictive_distribution("z")
    assert collection.batch_value == "mean"
