# SPDX-License-Identifier: Apache-2.0
"""The serde for LMCache: chunks as bytes and back; with torch and LMCache, through their processor."""
import os
import sys
import unittest

import numpy as np

sys.path.insert(0, sys.argv.pop(1))
from tierkv._lmcache_bytes import ChunkFormat, pack_chunk, unpack_chunk  # noqa: E402
from tierkv.errors import CorruptError, NonFiniteError, OutOfRangeError  # noqa: E402

try:
    import torch
    import tierkv.lmcache
    from lmcache.v1.distributed.api import MemoryLayoutDesc
except ImportError:
    torch = None

SEED = int.from_bytes(os.urandom(4), "little")


def chunk(shape, seed=SEED):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class Chunks(unittest.TestCase):
    def test_values_come_back_within_half_a_step(self):
        for k_bits, v_bits in ((8, 4), (4, 2), (2, 8)):
            format = ChunkFormat(k_bits, v_bits, 64)
            x = chunk((2, 3, 17, 128))
            out = np.full(format.size(x.shape) + 5, 0xA5, np.uint8)
            self.assertEqual(pack_chunk(format, x, out), out.size - 5)
            self.assertTrue((out[-5:] == 0xA5).all())
            back = unpack_chunk(out, x.shape)
            for part, read, bits in zip(x, back, (k_bits, v_bits)):
                heads = part.reshape(-1, 64)
                span = heads.max(1) - heads.min(1)
                # Half a step; scale and zero point are rounded to fp16, by up to 2^-11 of the span and of the least value.
                bound = span / (2**bits - 1) / 2 + 2.0**-11 * (span + np.abs(heads).max(1)) + 2.0**-24
                error = np.abs(read.reshape(-1, 64) - heads).max(1)
                self.assertTrue((error <= bound).all(), f"seed {SEED}, {bits} bits")

    def test_a_chunk_without_tokens(self):
        format = ChunkFormat(8, 4, 64)
        out = np.empty(format.size((2, 3, 0, 128)), np.uint8)
        pack_chunk(format, chunk((2, 3, 0, 128)), out)
        self.assertEqual(unpack_chunk(out, (2, 3, 0, 128)).shape, (2, 3, 0, 128))

    def test_damage_is_found(self):
        format = ChunkFormat(8, 4, 64)
        x = chunk((2, 2, 5, 64))
        out = np.empty(format.size(x.shape), np.uint8)
        pack_chunk(format, x, out)
        for i in range(out.size):
            hurt = out.copy()
            hurt[i] ^= 1 << int(np.random.default_rng(SEED + i).integers(8))
            with self.assertRaises(CorruptError, msg=f"byte {i}, seed {SEED}"):
                unpack_chunk(hurt, x.shape)
        for cut in (0, 31, 32, out.size - 1):
            with self.assertRaises(CorruptError):
                unpack_chunk(out[:cut], x.shape)
        with self.assertRaisesRegex(CorruptError, "shape"):
            unpack_chunk(out, (2, 2, 64, 5))

    def test_what_no_chunk_can_hold(self):
        format = ChunkFormat(8, 4, 64)
        out = np.empty(4096, np.uint8)
        for bad, error in ((np.nan, NonFiniteError), (np.inf, NonFiniteError), (1e9, OutOfRangeError)):
            x = chunk((2, 1, 2, 64))
            x[1, 0, 1, 3] = bad
            with self.assertRaises(error):
                pack_chunk(format, x, out)
        for shape in ((1, 1, 2, 64), (2, 1, 2, 96), (2, 2, 64)):
            with self.assertRaises(ValueError):
                format.size(shape)
        with self.assertRaisesRegex(ValueError, "are there"):
            pack_chunk(format, chunk((2, 1, 2, 64)), out[:100])
        for widths in ((3, 4), (8, 16), (8, 0)):
            with self.assertRaises(ValueError):
                ChunkFormat(*widths, 64)


class Memory:
    """What the serde reads of a MemoryObj."""

    def __init__(self, tensor):
        self.tensor = tensor


@unittest.skipIf(torch is None, "needs torch and lmcache")
class Serde(unittest.TestCase):
    def test_through_the_processor(self):
        from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor
        processor = create_serde_processor(SerdeConfig("tierkv", {"format": "k8v4", "head_dim": 64}))
        try:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                x = torch.from_numpy(chunk((2, 4, 32, 128))).to(dtype)
                size = processor.estimate_serialized_size(MemoryLayoutDesc([x.shape], [dtype]))
                self.assertLess(size, x.numel() * 2 * 0.42)
                data, back = Memory(torch.zeros(size, dtype=torch.uint8)), Memory(torch.zeros_like(x))
                for submit, query, args in ((processor.submit_serialize, processor.query_serialize_result, ([Memory(x)], [data])),
                                            (processor.submit_deserialize, processor.query_deserialize_result, ([data], [back]))):
                    task = submit(*args, [None])
                    done = None
                    while done is None:
                        done = query(task)
                    self.assertTrue(done)
                error = (back.tensor.float() - x.float()).norm(dim=-1) / x.float().norm(dim=-1)
                self.assertLess(error[0].max(), 0.02)
                self.assertLess(error[1].max(), 0.2)
        finally:
            processor.close()

    def test_other_dtypes_are_refused(self):
        format = ChunkFormat(8, 4, 64)
        x, data = torch.zeros(2, 1, 2, 64), Memory(torch.zeros(format.size((2, 1, 2, 64)), dtype=torch.uint8))
        tierkv.lmcache.Serializer(format).serialize(Memory(x), data, None)
        for dtype in (torch.float64, torch.uint8, torch.float8_e4m3fn):
            with self.assertRaisesRegex(TypeError, "source is of torch"):
                tierkv.lmcache.Serializer(format).serialize(Memory(x.to(dtype)), data, None)
            with self.assertRaisesRegex(TypeError, "destination is of torch"):
                tierkv.lmcache.Deserializer().deserialize(data, Memory(x.to(dtype)), None)

    def test_settings_are_checked(self):
        for settings, reason in (({"format": "k16v4", "head_dim": 64}, "format"), ({"bits": 4}, "unknown setting 'bits'"), ({"head_dim": 6}, "head_dim"),
                                 ({}, "head_dim is missing")):
            with self.assertRaisesRegex(ValueError, reason):
                tierkv.lmcache.create(settings)


if __name__ == "__main__":
    unittest.main()
