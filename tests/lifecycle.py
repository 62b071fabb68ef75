"""What a user does with a block, step by step, and dense matrices to compare it with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Block:
    """A layer with a block, and the dense matrices that the block stands for."""

    batch: Callable[..., dict]  # values for a number of examples, a seed and an element type
    registered: Callable[..., Any]  # a collection with the layer in a number of towers
    # The block's matrix for values and for a damping.
    matrix: Callable[..., Any]
    damped: Callable[..., Any]
    shapes: list  # of the layer's parameters
    pack: Callable[..., Any]  # from arrays of these shapes to the packed matrix
    exact: float = 1e-11  # float64 sums of some hundred terms of size one
    # float32, relative to the largest entry of an inverse of condition about a hundred
    single: float = 2e-4
    locations: int = 1  # positions of the output, by which the block divides the damping
    sides: Callable[..., Any] = lambda values: ()  # the averages of the factors
    linear: bool = False  # whether the mean of two batches has the mean of their matrices
    summed: bool = True  # whether sources add to the matrix
    root: Callable[..., Any] | None = None  # of the damped matrix, if it is a certain one


def observe(collection, grads_list, batches, *, damping=0.1, exps=(), decay=0.9, cholesky=False):
    """The collection's only block, its factors averaged over the batches and refreshed."""
    (block,) = collection.get_blocks()
    block.instantiate_factors(grads_list, damping)
    for exp in exps:
        block.register_matpower(exp)
    if cholesky:
        block.register_cholesky()
        block.register_cholesky_inverse()
    factors = collection.get_factors()
    for factor in factors:
        factor.instantiate_cov_variables()
    updates = [factor.make_covariance_update_op(decay) for factor in factors]
    for factor in factors:
        factor.instantiate_inv_variables()
    for values in batches:
        for update in updates:
            update(values)
    for factor in factors:
        for refresh in factor.make_inverse_update_ops():
            refresh()
    return block


def as_matrix(product, shapes, to_packed, dtype=np.float64):
    """The matrix of a linear map on arrays of these shapes, in the order of the packed matrix.

    ``to_packed`` brings a tuple of arrays to the packed matrix.
    """
    columns = []
    sizes = [int(np.prod(shape)) for shape in shapes]
    for i in range(sum(sizes)):
        flat = np.zeros(sum(sizes), dtype)
        flat[i] = 1
        pieces = np.split(flat, np.cumsum(sizes)[:-1])
        vector = tuple(p.reshape(shape) for p, shape in zip(pieces, shapes, strict=True))
        result = product(vector if len(shapes) > 1 else vector[0])
        source = to_packed(vector).ravel()
        parts = result if isinstance(result, tuple) else (result,)
        columns.append((int(np.argmax(source)), to_packed(parts).ravel()))
    matrix = np.empty((sum(sizes), sum(sizes)), dtype)
    for where, column in columns:
        matrix[:, where] = column
    return matrix


def assert_products(block, B, shapes, to_packed, tolerance, *, exps=(), dtype=np.float64):
    """Powers of the block, 1 and ``exps``, its root and their transposes are those of ``B``."""

    def matrix_of(multiply, *options):
        return as_matrix(lambda v: multiply(v, *options), shapes, to_packed, dtype)

    def assert_close(found, expected):
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * abs(expected).max())

    for exp in (1, *exps):
        assert_close(matrix_of(block.multiply_matpower, exp), power(B, exp))
    root = matrix_of(block.multiply_cholesky).astype(float)
    assert_close(root @ root.T, B)
    inverse = np.linalg.inv(root)
    for multiply, matrix in [
        (block.multiply_cholesky, root),
        (block.multiply_cholesky_inverse, inverse),
    ]:
        for transpose in (False, True):
            assert_close(matrix_of(multiply, transpose), matrix.T if transpose else matrix)


def plain_packing(parts):
    """A weight whose last axis is the output, and a bias below it."""
    rows = [parts[0].reshape(-1, parts[0].shape[-1])] + [p.reshape(1, -1) for p in parts[1:]]
    return np.concatenate(rows)


def second_moment(rows, has_bias=False):
    """Mean of the outer products of rows ``(k, d)``, a one appended to each if there is a bias."""
    rows = np.asarray(rows, np.float64)
    if has_bias:
        rows = np.concatenate([rows, np.ones((len(rows), 1))], axis=1)
    return sum(np.outer(row, row) for row in rows) / len(rows)


def split(A, G, damping, locations=1):
    """The factors' dampings: ``damping / locations``, split by the ratio of their mean traces."""
    pi = np.sqrt(np.trace(A) / len(A) / (np.trace(G) / len(G)))
    root = np.sqrt(damping / locations)
    return root * pi, root / pi


def damped_block(A, G, damping, c):
    """``c · (A + λ_A) ⊗ (G + λ_G)``, dense."""
    a, g = split(A, G, damping, c)
    return c * np.kron(A + a * np.eye(len(A)), G + g * np.eye(len(G)))


def power(matrix, exp):
    """A power of a symmetric positive definite matrix, by its eigenvalues."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * values**exp) @ vectors.T
