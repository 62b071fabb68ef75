"""Layers of models that everyone knows: ResNet-50, GPT-2 small, ViT-B/16.

A layer is the size of ``A`` (with the bias) and the size of ``G``.
"""

from typing import NamedTuple

from kfac_engine.distributed.owners import FactorSize, LayerSize


class Layer(NamedTuple):
    a: int
    g: int
    diagonal: bool = False  # A is a diagonal: an embedding

    @property
    def sizes(self):
        """The sizes of its square factors."""
        return (self.g,) if self.diagonal else (self.a, self.g)


def square(size):
    """A factor with an inverse."""
    return FactorSize(size**3, 4 * size * (size + 1) // 2)


def resnet50():
    """Convolutions without biases, 1×1, 3×3, 1×1 in each block."""
    layers = [Layer(3 * 49, 64)]
    channels = 64
    for stage, depth in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(depth):
            layers += [Layer(channels, width), Layer(9 * width, width), Layer(width, 4 * width)]
            layers += [Layer(channels, 4 * width)] * (not block)  # the shortcut
            channels = 4 * width
    return [*layers, Layer(2049, 1000)]


def transformer():
    """12 layers of width 768: queries, keys and values; their output; two dense layers."""
    shapes = (769, 3 * 768), (769, 768), (769, 4 * 768), (4 * 768 + 1, 768)
    return [Layer(a, g) for a, g in shapes] * 12


GPT2 = [*transformer(), Layer(50257, 768, diagonal=True)]
VIT = [*transformer(), Layer(769, 1000), Layer(769, 768)]
MODELS = {"ResNet-50": resnet50(), "GPT-2 small": GPT2, "ViT-B/16": VIT}


def sizes(name):
    """The sizes of the layers and factors of a model; several ranks may own a table."""
    factors, layers = {}, {}
    for index, layer in enumerate(MODELS[name]):
        sides = {f"layer {index}: A": layer.a, f"layer {index}: G": layer.g}
        factors |= {factor: square(side) for factor, side in sides.items()}
        if layer.diagonal:
            factors[f"layer {index}: A"] = FactorSize()
        numbers = layer.a * layer.g
        rows = layer.a if layer.diagonal else 1
        products = float(numbers * sum(layer.sizes))
        layers[f"layer {index}"] = LayerSize(4 * numbers, products, tuple(sides), rows=rows)
    return layers, factors
