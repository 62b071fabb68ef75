"""A model with a curvature: products of vectors with powers of the damped Fisher matrix."""

from collections.abc import Callable, Mapping, Sequence

from kfac_engine._types import Array, Rows, entries
from kfac_engine.arguments import number
from kfac_engine.backend.threads import single_threaded_blas
from kfac_engine.curvature.block_products import Product
from kfac_engine.curvature.estimator import FisherEstimator
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.distribution import Distribution
from kfac_engine.engine.measured_model import MeasuredModel
from kfac_engine.engine.replicate import Replicate
from kfac_engine.engine.rollback import quiet
from kfac_engine.engine.shard import Shard
from kfac_engine.engine.validation import check_products, checked_vectors
from kfac_engine.errors import NotReadyError
from kfac_engine.layers.parameter_slices import is_whole, join, split

DISTRIBUTIONS: Mapping[str, type[Distribution]] = {"replicate": Replicate, "shard": Shard}


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
        distribution = DISTRIBUTIONS[assembly.options.distribution]
        self._distribution = distribution(self._shards, assembly, estimator, self._layer_reports)

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
        with single_threaded_blas(), self._shards.together():
            number("exp", exp)
            products = self._precondition(self._checked(gradients), exp)
            self._distribution.conclude()
            return products

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
        return self._multiply_root(vectors, self.estimator.products.cholesky, transpose, 0.5)

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
        root = self.estimator.products.cholesky_inverse
        return self._multiply_root(vectors, root, transpose, -0.5)

    def synchronize(self) -> None:
        """Make the averages of all processes whole, so that they can be read; a collective call.

        Between two refreshes, an average that only refreshes read is divided among the processes of
        a communicator. ``save``, and products with the power 1, call this method. One process has
        nothing to do.
        """
        with self._shards.together():
            self._distribution.complete()

    # -- private ----------------------------------------------------------------------------------

    def _multiply_root(
        self,
        vectors: Mapping[str, Array],
        root: Callable[[bool], Product],
        transpose: bool,
        exp: float,
    ) -> dict[str, Array]:
        with single_threaded_blas(), self._shards.together():
            product = root(transpose)
            products = self._multiply(self._checked(vectors), product, exp)
            self._distribution.conclude()
            return products

    def _checked(self, vectors: Mapping[str, Array]) -> dict[str, Array]:
        """Return vectors by parameter name, checked; a factor without statistics is an error."""
        if any(factor.average.value is None for factor in self.estimator.factors):
            raise NotReadyError("there are no statistics yet; call observe() or step() first.")
        return checked_vectors(self._model, self.collection.backend, vectors)

    def _precondition(
        self, gradients: Mapping[str, Array | Rows], exp: float, names: Sequence[str] | None = None
    ) -> dict[str, Array]:
        product = self.estimator.products.matpower(exp, self._distribution.columns)
        return self._multiply(gradients, product, exp, names)

    def _multiply(
        self,
        vectors: Mapping[str, Array | Rows],
        product: Product,
        exp: float,
        names: Sequence[str] | None = None,
    ) -> dict[str, Array]:
        """Multiply vectors by blocks, and entries of parameters without a layer by the damping.

        Args:
            vectors: Parameter to array, or to the rows of a table that this process owns.
            product: A product of a block.
            exp: The power that it is, for parameters without a block.
            names: Parameters of all products, if ``vectors`` has those of this process only.

        Returns:
            Parameter to product.
        """
        if exp == 1:
            self._distribution.complete()
        slices = self._discovery.parts
        # The damping of entries without a layer may be that of the mean block, which takes time.
        whole = all(is_whole(slices[name]) for name in vectors)
        rest = 1.0 if whole else self.estimator.identity_damping**exp

        def multiply() -> dict[str, Array | Rows]:
            owned = self._distribution.owned(vectors)
            with quiet():
                blocks = self.estimator.products.multiply(split(slices, owned), product)
                products = {n: join(slices[n], blocks, v, rest) for n, v in owned.items()}
            arrays = {name: entries(product) for name, product in products.items()}
            check_products(arrays, self.collection.backend, exp)
            return products

        names = tuple(vectors) if names is None else names
        return self._model.to_file_layout(self._distribution.share(names, multiply))
