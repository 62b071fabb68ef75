"""A model with a curvature: products of vectors with powers of the damped Fisher matrix."""

from collections.abc import Mapping, Sequence

from kfac_engine._types import Array
from kfac_engine.arguments import number
from kfac_engine.backend.threads import single_threaded_blas
from kfac_engine.curvature.block_products import Product
from kfac_engine.curvature.estimator import FisherEstimator
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.measured_model import MeasuredModel
from kfac_engine.engine.replicate import Replicate
from kfac_engine.engine.rollback import quiet
from kfac_engine.engine.validation import check_products, checked_vectors
from kfac_engine.errors import NotReadyError
from kfac_engine.layers.parameter_slices import join, split


class PreconditioningModel(MeasuredModel):
    """A model with a curvature; ``Engine`` adds steps.

    Args:
        assembly: The model, its losses and its layers.
        estimator: Statistics and products over the collection.
        exps: Powers to precondition with.
    """

    def __init__(
        self, assembly: Assembly, estimator: FisherEstimator, exps: Sequence[float]
    ) -> None:
        super().__init__(assembly, estimator, exps)
        self._distribution = Replicate(self._shards, estimator)

    def precondition(self, gradients: Mapping[str, Array], exp: float = -1) -> dict[str, Array]:
        """Return gradients times a power of the damped Fisher matrix, as of the last refresh.

        Args:
            gradients: Parameter name to array, from any library. A block needs the gradients of
                all its parameters; blocks without gradients are left out.
            exp: One of ``exps``, or 1, which reads the current averages.

        Returns:
            Parameter name to a new array.

        Raises:
            UnknownNameError: A name is not a parameter, or the power is none of ``exps``.
            InputError: The bias or the weight of a block is missing.
            ShapeError: A gradient has another shape than its parameter.
            NonFiniteError: A gradient contains NaN or infinity.
            NotReadyError: Nothing was observed yet.
        """
        number("exp", exp)
        vectors = self._checked(gradients)
        with single_threaded_blas():
            return self._precondition(vectors, exp)

    def multiply_cholesky(
        self, vectors: Mapping[str, Array], transpose: bool = False
    ) -> dict[str, Array]:
        """Return ``B v`` with the factor ``B`` of the damped Fisher matrix, ``B Bᵀ = F + λI``.

        ``B`` belongs to the last refresh and needs the option ``compute_cholesky``.

        Args:
            vectors: Parameter name to array, as for ``precondition``.
            transpose: Whether the product is ``Bᵀ v``.

        Returns:
            Parameter name to array, new.

        Raises:
            KfacError: As for ``precondition``, or the option is not set.
        """
        product, checked = self.estimator.products.cholesky(transpose), self._checked(vectors)
        with single_threaded_blas():
            return self._multiply(checked, product, 0.5)

    def multiply_cholesky_inverse(
        self, vectors: Mapping[str, Array], transpose: bool = False
    ) -> dict[str, Array]:
        """Return ``B⁻¹ v``; see ``multiply_cholesky``. It needs ``compute_cholesky_inverse``.

        With ``transpose`` the product is ``B⁻ᵀ v``: of standard normal numbers ``v`` it has the
        covariance ``(F + λI)⁻¹``.

        Args:
            vectors: Parameter name to array, as for ``precondition``.
            transpose: Whether the product is ``B⁻ᵀ v``.

        Returns:
            Parameter name to array, new.

        Raises:
            KfacError: As for ``multiply_cholesky``.
        """
        product = self.estimator.products.cholesky_inverse(transpose)
        checked = self._checked(vectors)
        with single_threaded_blas():
            return self._multiply(checked, product, -0.5)

    # -- private ----------------------------------------------------------------------------------

    def _checked(self, vectors: Mapping[str, Array]) -> dict[str, Array]:
        """Return vectors by parameter name, checked; a factor without statistics is an error."""
        if any(factor.average.value is None for factor in self.estimator.factors):
            raise NotReadyError("there are no statistics yet; call observe() or step() first.")
        return checked_vectors(self._model, self.collection.backend, vectors)

    def _precondition(self, gradients: Mapping[str, Array], exp: float) -> dict[str, Array]:
        return self._multiply(gradients, self.estimator.products.matpower(exp), exp)

    def _multiply(
        self, vectors: Mapping[str, Array], product: Product, exp: float
    ) -> dict[str, Array]:
        """Multiply vectors by blocks, and entries of parameters without a layer by the damping."""
        slices, rest = self._discovery.parts, self.estimator.identity_damping**exp
        with quiet():
            blocks = self.estimator.products.multiply(split(slices, vectors), product)
            products = {n: join(slices[n], blocks, v, rest) for n, v in vectors.items()}
        check_products(products, self.collection.backend, exp)
        return self._model.to_file_layout(products)
