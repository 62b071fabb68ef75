"""Operators and domains without a derivative, with the reason for the error message."""

from collections.abc import Mapping

_WHOLE = "it computes with whole numbers that stand for rounded ones"
_TEXT = "it reads text"

REFUSED: Mapping[str, str] = {
    "BitCast": "it reads the bits of a number as those of another type",
    "ConvInteger": _WHOLE,
    "ImageDecoder": "it reads the bytes of a picture",
    "MatMulInteger": _WHOLE,
    "OptionalHasElement": "it asks whether there is a value",
    "RegexFullMatch": _TEXT,
    "StringConcat": _TEXT,
    "StringNormalizer": _TEXT,
    "StringSplit": _TEXT,
    "TfIdfVectorizer": "it counts words",
}

_OPTIMIZED = (
    "ONNX Runtime writes it into files that it saves after optimization, for one kind of "
    "processor; use the file from before, or save with ORT_ENABLE_BASIC as "
    "graph_optimization_level"
)

REFUSED_DOMAINS: Mapping[str, str] = {
    "com.microsoft.nchwc": _OPTIMIZED,
    "com.ms.internal.nhwc": _OPTIMIZED,
}
