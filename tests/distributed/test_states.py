"""States of several ranks are those of one process, and any number of ranks resumes them."""

import onnx
import pytest

import kfac_engine as ke
from tests import models
from tests.comparing import assert_arrays_equal, assert_arrays_near
from tests.distributed.test_distributions import CUTS, DISTRIBUTIONS, batches, model_of
from tests.distributed.threads import rows_of, run

OPTIONS = {"loss": "categorical", "damping": 0.1, "schedule": ke.Schedule(refresh_every=2)}


def steps(engine, data, rows=slice(None)):
    results = []
    for inputs, targets in data:
        part = {key: array[rows] for key, array in inputs.items()}
        results.append(engine.step(part, targets[rows]))
    return results


def alone(name, data, **options):
    engine = ke.Engine.from_onnx(model_of(name), **OPTIONS, **options)
    return engine, steps(engine, data)


@pytest.mark.parametrize("approximation", ["kron", "ekfac"])
@pytest.mark.parametrize("saving", DISTRIBUTIONS)
@pytest.mark.parametrize("resuming", [(1, "replicate"), (2, "shard"), (4, "replicate")])
def test_any_number_of_ranks_resumes_a_state(saving, resuming, approximation, tmp_path):
    data, path = list(batches("mlp", 6)), tmp_path / "state.safetensors"
    chosen = {"approximations": {"fully_connected": approximation}}
    _, expected = alone("mlp", data, **chosen)

    def save(communicator):
        engine = ke.Engine.from_onnx(
            model_of("mlp"), communicator=communicator, distribution=saving, **OPTIONS, **chosen
        )
        steps(engine, data[:3], rows_of(communicator, CUTS))
        engine.save(path)
        return steps(engine, data[3:], rows_of(communicator, CUTS))  # goes on after it has saved

    size, distribution = resuming

    def resume(communicator):
        engine = ke.Engine.from_onnx(
            model_of("mlp"),
            communicator=communicator,
            distribution=distribution,
            **OPTIONS,
            **chosen,
        )
        engine.load(path)
        return steps(engine, data[3:], rows_of(communicator, CUTS))

    for results in (*run(3, save), *run(size, resume)):
        for result, wanted in zip(results, expected[3:], strict=True):
            assert_arrays_near(result.natural_gradients, wanted.natural_gradients, 1e-12)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_file_of_several_ranks_is_that_of_one_process(distribution, tmp_path):
    data = list(batches("mlp", 3))
    engine, _ = alone("mlp", data)

    def work(communicator):
        ranked = ke.Engine.from_onnx(
            model_of("mlp"), communicator=communicator, distribution=distribution, **OPTIONS
        )
        steps(ranked, data, rows_of(communicator, CUTS))
        ranked.save(tmp_path / "ranks.safetensors")

    run(3, work)
    other = ke.Engine.from_onnx(model_of("mlp"), **OPTIONS)
    other.load(tmp_path / "ranks.safetensors")
    for one, two in zip(engine.estimator.factors, other.estimator.factors, strict=True):
        assert_arrays_near(two.arrays(), one.arrays(), 1e-12)
    assert other.counter == engine.counter
    assert other.estimator.rng.bit_generator.state == engine.estimator.rng.bit_generator.state


def test_a_state_that_one_rank_cannot_read_changes_no_rank(tmp_path):
    data, path = list(batches("mlp", 3)), tmp_path / "state.safetensors"
    alone("mlp", data)[0].save(path)

    def work(communicator):
        engine = ke.Engine.from_onnx(model_of("mlp"), communicator=communicator, **OPTIONS)
        steps(engine, data[:1], rows_of(communicator, CUTS))
        engine.synchronize()
        before = [factor.arrays() for factor in engine.estimator.factors]
        with pytest.raises(ke.InputError, match=r"rank 1 of 3 refused: .*missing"):
            engine.load(path if communicator.rank != 1 else tmp_path / "missing")
        for factor, arrays in zip(engine.estimator.factors, before, strict=True):
            assert_arrays_near(factor.arrays(), arrays, 0.0)
        assert engine.counter == 1

    run(3, work)


def test_a_file_that_the_first_rank_cannot_write_is_an_error_of_all(tmp_path):
    def work(communicator):
        engine = ke.Engine.from_onnx(models.mlp(), communicator=communicator, **OPTIONS)
        for write in (engine.save, engine.export):
            with pytest.raises(ke.InputError, match="rank 0 of 2 refused"):
                write(tmp_path / "no folder" / "file")

    run(2, work)


def test_ranks_export_the_model_of_one_process(tmp_path):
    def work(communicator):
        engine = ke.Engine.from_onnx(models.mlp(), communicator=communicator, **OPTIONS)
        engine.set_parameters({name: 2 * v for name, v in engine.parameters.items()})
        engine.export(tmp_path / "ranks.onnx")
        return engine.parameters

    parameters = run(3, work)[0]
    written = onnx.load(tmp_path / "ranks.onnx")
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in written.graph.initializer}
    assert_arrays_equal(arrays, parameters)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_products_with_given_vectors_equal_those_of_one_process(distribution):
    data = list(batches("mlp", 3))
    engine, results = alone("mlp", data)
    gradients = results[-1].gradients
    expected = [engine.precondition(gradients, exp) for exp in (-1, 1)]

    def work(communicator):
        ranked = ke.Engine.from_onnx(
            model_of("mlp"), communicator=communicator, distribution=distribution, **OPTIONS
        )
        steps(ranked, data, rows_of(communicator, CUTS))
        return [ranked.precondition(gradients, exp) for exp in (-1, 1)]

    for products in run(3, work):
        for product, wanted in zip(products, expected, strict=True):
            assert_arrays_near(product, wanted, 1e-12)


def test_a_divided_average_is_read_after_all_ranks_have_synchronized():
    data = list(batches("mlp", 2))
    engine, _ = alone("mlp", data)
    name = next(iter(engine.parameters))
    expected = engine.factors[name].input.value

    def work(communicator):
        ranked = ke.Engine.from_onnx(model_of("mlp"), communicator=communicator, **OPTIONS)
        steps(ranked, data, rows_of(communicator, CUTS))
        with pytest.raises(ke.NotReadyError, match=r"call engine.synchronize\(\) in all"):
            _ = ranked.factors[name].input.value
        ranked.synchronize()
        return ranked.factors[name].input.value

    for average in run(3, work):
        assert_arrays_near({"": average}, {"": expected}, 1e-12)
