"""All models of the corpus by family."""

from collections.abc import Mapping

from tests.exporters import (
    corpus_dense,
    corpus_images,
    corpus_indexing,
    corpus_language,
    corpus_perception,
    corpus_sequences,
)
from tests.exporters.case import Case

FAMILIES: Mapping[str, tuple[Case, ...]] = {
    "dense layers and activations": corpus_dense.CASES,
    "convolutions": corpus_images.CONVOLUTIONS,
    "pooling": corpus_images.POOLS,
    "norms": corpus_images.NORMS,
    "resizing, padding, sampling": corpus_images.RESIZES,
    "convolutional networks": corpus_images.NETWORKS,
    "recurrent networks": corpus_sequences.RECURRENT,
    "attention": corpus_sequences.ATTENTION,
    "indexing, reductions, functions": corpus_indexing.CASES,
    "transformers: encoders": corpus_language.ENCODERS,
    "transformers: decoders": corpus_language.DECODERS,
    "transformers: pairs": corpus_language.PAIRS,
    "transformers: images": corpus_perception.IMAGES,
    "transformers: sound, images with text": (*corpus_perception.SOUNDS, *corpus_perception.BOTH),
}
