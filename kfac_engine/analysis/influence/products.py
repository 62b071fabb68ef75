"""Inner products of preconditioned queries with the gradients of many examples."""

from dataclasses import dataclass

from kfac_engine.analysis.fisher_matrix.gradient_forms import Gradients
from kfac_engine.analysis.fisher_matrix.spectrum import Float, Spectrum


@dataclass(slots=True, eq=False)
class Products:
    """Vectors of a block whose inner products with gradients are computed.

    The vectors are in the eigenvectors of the block. Either the gradients are rotated into them, or
    the vectors back: once, as soon as the examples have had more rows than the vectors have.

    Attributes:
        vectors: ``(q, g, d_in, d_out)``.
        rows: Number of rows of gradients so far.
        is_back: Whether the vectors are rotated back.
    """

    vectors: Float
    rows: int = 0
    is_back: bool = False

    def of(self, gradients: Gradients, spectrum: Spectrum) -> Float:
        """Return the inner products with gradients.

        Args:
            gradients: Gradients of ``m`` examples, not rotated.
            spectrum: The eigenvectors of their block.

        Returns:
            ``(q, m)``, summed over the cotangents of an example.
        """
        self.rows += gradients.rows
        if not self.is_back and self.rows > self.vectors[..., 0, :].size:
            self.vectors, self.is_back = spectrum.back(self.vectors), True
        rotated = gradients if self.is_back else gradients.into(spectrum)
        products: Float = rotated.products(self.vectors).sum(axis=2)
        return products
