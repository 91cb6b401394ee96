"""tierkv: lossy compression of KV caches.

    import tierkv
    results = tierkv.analyze("dump.h5", ["step", "k8v4:window=64"])     # what each scheme would do
    tierkv.compress("dump.h5", "cache.tkv", "step")
    with tierkv.open("cache.tkv") as cache:
        layer = cache.decode_layer(3)                                  # layer.k, layer.v: NumPy

    with tierkv.KvStore(config) as store: ...                            # the cache of many sequences, with attention

Errors are exceptions, all of them TierkvError.
"""
from ._library import core as _core
from .codec import (Codebook, Page, PageChoice, PageFormat, PageTokens, QuantizedRows, choose_page_bytes, decode, dequantize, encode,
                    quantize)
from .container import Cache, CacheInfo, Layer, Sequence, open, open_bytes
from .dumps import Compressed, Result, Thresholds, analyze, calibrate, compress, decompress
from .errors import (BufferTooSmallError, CorruptError, CudaError, InputOutputError, InvalidArgumentError, NonFiniteError, NotFoundError,
                     OutOfMemoryError, OutOfPagesError, OutOfRangeError, StaleSequenceError, TierkvError, UnsupportedError, VersionError)
from .kv_store import (Attention, ChannelFormat, CodedFormat, KvStore, StoreConfig, StoreUsage, TierClass, TierFormat, TiersFormat)
from .profile import ComponentProfile, Matrices, Profile, ProfileData, Rope, assign_classes, head_scales, read_profile, write_profile
from .prompt import lse, significance

__version__: str = _core().dll.tkv_version().decode()

__all__ = [
    "Attention", "BufferTooSmallError", "Cache", "CacheInfo", "ChannelFormat", "Codebook", "CodedFormat", "ComponentProfile",
    "Compressed", "CorruptError", "CudaError", "InputOutputError", "InvalidArgumentError", "KvStore", "Layer", "Matrices",
    "NonFiniteError", "NotFoundError", "OutOfMemoryError", "OutOfPagesError", "OutOfRangeError", "Page", "PageChoice", "PageFormat",
    "PageTokens", "Profile", "ProfileData", "QuantizedRows", "Result", "Rope", "Sequence", "StaleSequenceError", "StoreConfig",
    "StoreUsage", "Thresholds", "TierClass", "TierFormat", "TierkvError", "TiersFormat", "UnsupportedError", "VersionError",
    "__version__", "analyze", "assign_classes", "calibrate", "choose_page_bytes", "compress", "decode", "decompress", "dequantize",
    "encode", "head_scales", "lse", "open", "open_bytes", "quantize", "read_profile", "significance", "write_profile",
]
