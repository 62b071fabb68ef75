"""Layers of models that everyone knows: ResNet-50, GPT-2 small, ViT-B/16.

A layer is the size of ``A`` (with the bias), the size of ``G``, and its rows for each example.
"""

from typing import NamedTuple

from kfac_engine.ranks.sizes import BlockSize, FactorSize, ModelSize


class Layer(NamedTuple):
    a: int
    g: int
    rows: int
    diagonal: bool = False  # A is a diagonal: an embedding

    @property
    def sizes(self):
        """The sizes of its square factors."""
        return (self.g,) if self.diagonal else (self.a, self.g)


def resnet50():
    """Convolutions without biases, 1×1, 3×3, 1×1 in each block; the input has 224² pixels."""
    layers = [Layer(3 * 49, 64, 112**2)]
    channels = 64
    for stage, depth in enumerate((3, 4, 6, 3)):
        width, pixels = 64 << stage, (56 >> stage) ** 2
        for block in range(depth):
            before = pixels * 4 if stage and not block else pixels  # the 3×3 has the stride
            layers += [Layer(channels, width, before), Layer(9 * width, width, pixels)]
            layers += [Layer(width, 4 * width, pixels)]
            layers += [Layer(channels, 4 * width, pixels)] * (not block)  # the shortcut
            channels = 4 * width
    return [*layers, Layer(2049, 1000, 1)]


def transformer(tokens):
    """12 layers of width 768: queries, keys and values; their output; two dense layers."""
    shapes = (769, 3 * 768), (769, 768), (769, 4 * 768), (4 * 768 + 1, 768)
    return [Layer(a, g, tokens) for a, g in shapes] * 12


GPT2 = [*transformer(1024), Layer(50257, 768, 1024, diagonal=True)]
VIT = [*transformer(197), Layer(769, 1000, 1), Layer(769, 768, 197)]
MODELS = {"ResNet-50": resnet50(), "GPT-2 small": GPT2, "ViT-B/16": VIT}

# Examples of one rank, and operations of its forward pass between layers: products of queries with
# keys, and of attention with values.
BATCHES = {
    "ResNet-50": (32, 0.0),
    "GPT-2 small": (8, 4.0 * 12 * 8 * 1024**2 * 768),
    "ViT-B/16": (32, 4.0 * 12 * 32 * 197**2 * 768),
}


def model_size(name, *, divisible=True):
    """The sizes of a model with the batch of one rank; several ranks may own a table."""
    examples, between = BATCHES[name]
    factors, blocks = {}, {}
    for index, layer in enumerate(MODELS[name]):
        sides = {f"layer {index}: A": layer.a, f"layer {index}: G": layer.g}
        for factor, side in sides.items():
            factors[factor] = FactorSize((side, side), side**2, side**3, True, True)
        if layer.diagonal:
            factors[f"layer {index}: A"] = FactorSize((layer.a,))
        rows, numbers = layer.rows * examples, layer.a * layer.g
        blocks[f"layer {index}"] = BlockSize(
            numbers,
            tuple(sides),
            rows=rows,
            forward=2 * rows * numbers + between / len(MODELS[name]),
            products=2 * numbers * sum(layer.sizes),
            divisible="rows" if layer.diagonal and divisible else None,
            extent=layer.a if layer.diagonal else 1,
        )
    return ModelSize(blocks, factors)
