"""The page that maps TensorFlow's K-FAC to ours: complete, and true of the code and of the tests.

The names below were read off the five pages of documentation that specify them; the tables of
`docs/from_tensorflow.md` must have a row for each, and each row must hold.
"""

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

import kfac_engine as ke
from kfac_engine.curvature.approximations import accepted
from kfac_engine.curvature.estimation_modes import MODES
from kfac_engine.data import demo_model, digits
from tests.violations import assert_none

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "from_tensorflow.md").read_text(encoding="utf-8")

BLOCK = """
num_registered_towers
full_fisher_block()
instantiate_factors(grads_list, damping)
multiply(vector)
multiply_inverse(vector)
multiply_matpower(vector, exp)
register_additional_tower(inputs, outputs)
register_inverse()
register_matpower(exp)
tensors_to_compute_grads()
"""
PAGES = {
    "LayerCollection": """
__init__(graph=None, name="LayerCollection")
fisher_blocks
fisher_factors
losses
loss_colocation_ops
default_conv2d_approximation
default_conv2d_multi_approximation
default_embedding_approximation
default_embedding_multi_approximation
default_fully_connected_approximation
default_fully_connected_multi_approximation
default_generic_approximation
graph
linked_parameters
registered_variables
subgraph
towers_by_loss
as_default()
check_registration(variables)
create_subgraph()
define_linked_parameters(params, approximation=None)
eval_losses()
eval_losses_on_samples()
get_blocks()
get_factors()
make_or_get_factor(cls, args)
register_block(layer_key, fisher_block, reuse=VARIABLE_SCOPE)
register_categorical_predictive_distribution(logits, seed=None, targets=None, name=None, \
reuse=VARIABLE_SCOPE)
register_conv2d(params, strides, padding, inputs, outputs, data_format=None, dilations=None, \
approx=None, reuse=VARIABLE_SCOPE)
register_conv2d_multi(params, strides, padding, inputs, outputs, num_uses=None, \
data_format=None, dilations=None, approx=None, reuse=VARIABLE_SCOPE)
register_convolution(params, inputs, outputs, padding, strides=None, dilation_rate=None, \
data_format=None, approx=None, reuse=VARIABLE_SCOPE)
register_depthwise_conv2d(params, inputs, outputs, strides, padding, rate=None, \
data_format=None, approx=None, reuse=VARIABLE_SCOPE)
register_embedding(params, inputs, outputs, approx=None, reuse=VARIABLE_SCOPE)
register_embedding_multi(params, inputs, outputs, num_uses=None, approx=None, reuse=VARIABLE_SCOPE)
register_fully_connected(params, inputs, outputs, approx=None, reuse=VARIABLE_SCOPE)
register_fully_connected_multi(params, inputs, outputs, num_uses=None, approx=None, \
reuse=VARIABLE_SCOPE)
register_generic(params, batch_size, approx=None, reuse=VARIABLE_SCOPE)
register_loss_function(loss, colocation_op, base_name, name=None, reuse=VARIABLE_SCOPE)
register_multi_bernoulli_predictive_distribution(logits, seed=None, targets=None, name=None, \
reuse=VARIABLE_SCOPE)
register_normal_predictive_distribution(mean, var=0.5, seed=None, targets=None, name=None, \
reuse=VARIABLE_SCOPE)
register_separable_conv2d(depthwise_params, pointwise_params, inputs, depthwise_outputs, \
pointwise_outputs, strides, padding, rate=None, data_format=None, approx=None, \
reuse=VARIABLE_SCOPE)
set_default_conv2d_approximation(value)
set_default_embedding_approximation(value)
set_default_fully_connected_approximation(value)
set_default_fully_connected_multi_approximation(value)
set_default_generic_approximation(value)
total_loss()
total_sampled_loss()
""",
    "FisherEstimator": """
__init__(variables, cov_ema_decay, damping, layer_collection, exps=(-1,), \
estimation_mode="gradients", colocate_gradients_with_ops=True, name="FisherEstimator", \
compute_cholesky=False, compute_cholesky_inverse=False, compute_params_stats=False, \
batch_size=None)
variables
params_stats
""",
    "FullyConnectedKFACBasicFB": f"__init__(layer_collection, has_bias=False)\n{BLOCK}",
    "ConvKFCBasicFB": f"""
__init__(layer_collection, params, padding, strides=None, dilation_rate=None, data_format=None, \
extract_patches_fn=None)
{BLOCK}""",
    "EmbeddingInputKroneckerFactor": """
__init__(input_ids, vocab_size, dtype=None)
name
get_cov()
get_cov_var()
instantiate_cov_variables()
instantiate_inv_variables()
left_multiply_matpower(x, exp, damping_func)
make_covariance_update_op(ema_decay)
make_inverse_update_ops()
register_matpower(exp, damping_func)
right_multiply_matpower(x, exp, damping_func)
""",
}
PARENTS = {
    "FullyConnectedKFACBasicFB": "KroneckerProductFB",
    "ConvKFCBasicFB": "KroneckerProductFB",
    "EmbeddingInputKroneckerFactor": "DiagonalFactor",
}
# Name of a mode to the matrix it estimates.
ESTIMATION_MODES = {
    "gradients": "Fisher",
    "empirical": "Empirical_Fisher",
    "curvature_prop": "Fisher",
    "curvature_prop_GGN": "GGN",
    "exact": "Fisher",
    "exact_GGN": "GGN",
}
# What the pages accept for `approx`, by kind of layer. The page of `register_convolution` also
# names "diagonal", which the library refuses.
APPROXIMATIONS = {
    "fully_connected": {"kron", "diagonal"},
    "fully_connected_multi": {"kron_indep", "kron_series_1", "kron_series_2"},
    "conv2d": {"kron", "diagonal"},
    "conv2d_multi": {"kron_indep"},
    "convolution": {"kron"},
    "depthwise_conv2d": {"diagonal"},
    "embedding": {"kron"},
    "embedding_multi": {"kron_indep"},
    "generic": {"full", "diagonal"},
}


def entries(text):
    """Rows of names as the page writes them: keywords of a scope are strings."""
    lines = [line for line in text.splitlines() if line]
    return [line.replace("=VARIABLE_SCOPE", '="VARIABLE_SCOPE"') for line in lines]


ENTRIES = [(page, entry) for page, text in PAGES.items() for entry in entries(text)]


# -- reading the page ------------------------------------------------------------------------------


def section(title):
    """The text under a heading."""
    heading = re.escape(title)
    (text,) = re.findall(rf"^## `?{heading}`?\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    return text


def rows(text):
    """Cells of all table rows of a text, below the headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rules = {i for i, line in enumerate(lines) if set(line) <= set("|- ")}
    kept = [line for i, line in enumerate(lines) if not rules & {i, i + 1}]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in kept]


def in_code(cell):
    return re.findall(r"`([^`]+)`", cell)


def first_cells(title):
    return [row[0] for row in rows(section(title))]


# -- completeness ----------------------------------------------------------------------------------


def test_page_has_exactly_one_row_per_name():
    for page, text in PAGES.items():
        listed = [in_code(cell)[0] for cell in first_cells(page) if not cell.startswith("argument")]
        listed = [name for name in listed if name not in ESTIMATION_MODES]
        assert sorted(listed) == sorted(entries(text)), page


def test_estimator_arguments_have_rows():
    listed = [in_code(cell)[0] for cell in first_cells("FisherEstimator") if "argument" in cell]
    _, arguments = signature_of(entries(PAGES["FisherEstimator"])[0])
    assert listed == list(arguments)


def test_estimation_modes_equal_page():
    listed = {in_code(row[0])[0]: row[1] for row in rows(section("FisherEstimator"))}
    modes = {name: matrix for name, matrix in listed.items() if name in ESTIMATION_MODES}
    assert modes == ESTIMATION_MODES
    assert {name: MODES[name].mat_type for name in ESTIMATION_MODES} == ESTIMATION_MODES


def test_approximations_of_page_are_accepted():
    listed = {
        in_code(r[0])[0]: set(in_code(r[1])) for r in rows(section("Approximations of the pages"))
    }
    assert listed == APPROXIMATIONS
    for kind, names in APPROXIMATIONS.items():
        assert names <= set(accepted(kind))


# -- truth of the rows -----------------------------------------------------------------------------


def instances():
    """An object of each class, for what is born with it."""
    lc = ke.LayerCollection(graph={"w": (2, 2, 3, 4)})
    lc.register_generic("w", batch_size=1)
    lc.register_squared_error_loss("z")
    return {
        "LayerCollection": lc,
        "FisherEstimator": ke.FisherEstimator(["w"], 0.9, 0.1, lc),
        "FullyConnectedKFACBasicFB": ke.FullyConnectedKFACBasicFB(lc),
        "ConvKFCBasicFB": ke.ConvKFCBasicFB(lc, "w", "SAME"),
        "EmbeddingInputKroneckerFactor": ke.EmbeddingInputKroneckerFactor(["ids"], 5),
    }


def signature_of(entry):
    """Name, and arguments with their defaults, of a call as the pages write it."""
    call = ast.parse(entry, mode="eval").body
    arguments = {argument.id: inspect.Parameter.empty for argument in call.args}
    arguments |= {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    return call.func.id, arguments


def test_attributes_of_page_exist():
    owners = instances()
    attributes = [(page, entry) for page, entry in ENTRIES if "(" not in entry]
    assert_none(
        f"{page}.{name} is a function"
        for page, name in attributes
        if callable(getattr(owners[page], name))
    )


def test_an_engine_has_the_methods_of_the_library():
    images, labels = digits()
    engine = ke.Engine.from_onnx(demo_model("mlp"), loss="categorical", threads=1)
    assert type(engine.collection) is ke.LayerCollection
    assert type(engine.estimator) is ke.FisherEstimator
    trace = ke.load_model(demo_model("mlp"), threads=1).run({"image": images[:50]}, labels[:50])
    loss = engine.loss({"image": images[:50]}, labels[:50])
    assert float(engine.collection.total_loss()(trace)) == pytest.approx(50 * loss)


def test_functions_of_page_have_its_arguments():
    calls = [(page, entry) for page, entry in ENTRIES if "(" in entry]
    assert_none(
        f"{page}: {entry}" for page, entry in calls if not has_arguments_of_page(page, entry)
    )


def has_arguments_of_page(page, entry):
    """Whether a function has the arguments of the page in front, and defaults for all others."""
    name, arguments = signature_of(entry)
    own = dict(inspect.signature(getattr(getattr(ke, page), name)).parameters)
    own.pop("self")
    if page == "LayerCollection" and "reuse" in own and "coeff" in own:
        assert own.pop("coeff").default == 1.0  # the one argument of ours between theirs
    defaults = {argument: parameter.default for argument, parameter in own.items()}
    further = list(defaults.values())[len(arguments) :]
    in_front = list(defaults.items())[: len(arguments)]
    return in_front == list(arguments.items()) and inspect.Parameter.empty not in further


@pytest.mark.parametrize(("name", "parent"), PARENTS.items())
def test_base_classes_equal_page(name, parent):
    assert issubclass(getattr(ke, name), getattr(ke, parent))


# -- tests -----------------------------------------------------------------------------------------


@cache
def names_of_tests(path):
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_rows_name_tests():
    titled = (*PAGES, "Approximations of the pages", "What differs, and why")
    described = [row for title in titled for row in rows(section(title))]
    assert len(described) > len(ENTRIES)
    for row in described:
        assert in_code(row[-1]), row
        assert all("::test_" in name for name in in_code(row[-1])), row


def test_tests_named_by_page_exist():
    tests = sorted(set(re.findall(r"([\w/]+\.py)::(\w+)", PAGE)))
    assert_none(f"{path}::{test}" for path, test in tests if test not in names_of_tests(path))
