# SPDX-License-Identifier: Apache-2.0
"""tierkv: lossy compression of KV caches.

    import tierkv
    results = tierkv.analyze("dump.h5", ["step", "k8v4:window=64"])     # what each scheme would do
    tierkv.compress("dump.h5", "cache.tkv", "step")
    with tierkv.Container("cache.tkv") as container:
        layer = container.decode_layer(3)                               # layer.k, layer.v: NumPy

    with tierkv.KvStore(config) as store: ...                           # the cache of many sequences, with attention

Calls that take arrays take NumPy's and PyTorch's. NumPy in gives NumPy out, a tensor in gives tensors out.
Every error that tierkv raises is a TierkvError, and the built-in exception that says the same.
"""
from ._library import core as _core
from .codec import (Codebook, Page, PageChoice, PageFormat, PageTokens, QuantizedRows, choose_page_bytes, decode, dequantize, encode,
                    quantize)
from .container import Container, ContainerInfo, ContainerLayer, ContainerSequence
from .dumps import AnalysisResult, CompressionResult, TierThresholds, analyze, calibrate, compress, decompress
from .errors import (ArgumentTypeError, BufferTooSmallError, CorruptError, CudaError, InputOutputError, InvalidArgumentError,
                     NonFiniteError, NotFoundError, OutOfMemoryError, OutOfPagesError, OutOfRangeError, StaleSequenceError, TierkvError,
                     UnsupportedError, VersionError)
from .kv_store import (Attention, ChannelFormat, CodedFormat, KvStore, StoreConfig, StoreUsage, TierClass, TierFormat, TiersFormat)
from .profile import ProfileData, Rope, assign_classes, head_scales, read_profile, write_profile
from .prompt import lse, significance

__version__: str = _core().dll.tkv_version().decode()

__all__ = [
    "AnalysisResult", "ArgumentTypeError", "Attention", "BufferTooSmallError", "ChannelFormat", "Codebook", "CodedFormat",
    "CompressionResult", "Container", "ContainerInfo", "ContainerLayer", "ContainerSequence", "CorruptError",
    "CudaError", "InputOutputError", "InvalidArgumentError", "KvStore", "NonFiniteError", "NotFoundError",
    "OutOfMemoryError", "OutOfPagesError", "OutOfRangeError", "Page", "PageChoice", "PageFormat", "PageTokens",
    "ProfileData", "QuantizedRows", "Rope", "StaleSequenceError", "StoreConfig", "StoreUsage", "TierClass", "TierFormat",
    "TierThresholds", "TierkvError", "TiersFormat", "UnsupportedError", "VersionError", "__version__", "analyze", "assign_classes",
    "calibrate", "choose_page_bytes", "compress", "decode", "decompress", "dequantize", "encode", "head_scales", "lse", "quantize",
    "read_profile", "significance", "write_profile",
]
