"""tierkv: lossy compression of KV caches.

    import tierkv
    results = tierkv.analyze("dump.h5", ["step", "k8v4:window=64"])     # what each scheme would do
    tierkv.compress("dump.h5", "cache.tkv", "step")
    with tierkv.open("cache.tkv") as cache:
        layer = cache.decode_layer(3)                                  # layer.k, layer.v: NumPy

Errors are exceptions, all of them TierkvError. Attention over compressed pages is in the C++ library, on the GPU.
"""
from ._library import core as _core
from .codec import (Codebook, Page, PageChoice, PageFormat, PageTokens, QuantizedRows, choose_page_bytes, decode, dequantize, encode,
                    quantize)
from .container import Cache, CacheInfo, Layer, Sequence, open, open_bytes
from .dumps import Compressed, Result, Thresholds, analyze, calibrate, compress, decompress
from .errors import (CorruptError, InputOutputError, InvalidArgumentError, NonFiniteError, NotFoundError, OutOfMemoryError,
                     OutOfRangeError, TierkvError, UnsupportedError, VersionError)

__version__: str = _core().dll.tkv_version().decode()

__all__ = [
    "Cache", "CacheInfo", "Codebook", "Compressed", "CorruptError", "InputOutputError", "InvalidArgumentError", "Layer",
    "NonFiniteError", "NotFoundError", "OutOfMemoryError", "OutOfRangeError", "Page", "PageChoice", "PageFormat", "PageTokens",
    "QuantizedRows", "Result", "Sequence", "Thresholds", "TierkvError", "UnsupportedError", "VersionError", "__version__", "analyze",
    "calibrate", "choose_page_bytes", "compress", "decode", "decompress", "dequantize", "encode", "open", "open_bytes", "quantize",
]
