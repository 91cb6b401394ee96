# SPDX-License-Identifier: Apache-2.0
"""The Python package as it is built, against NumPy, h5py and the command."""
import builtins
import gc
import pathlib
import pkgutil
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest

import h5py
import numpy as np

PACKAGE, TIERKV, ROOT = sys.argv[1:4]
sys.path.insert(0, PACKAGE)
import tierkv  # noqa: E402

SAMPLE = pathlib.Path(ROOT) / "datasets" / "sample_1k.h5"


class PackageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.dir = pathlib.Path(cls.folder.name)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def setUp(self):
        self.seed = random.SystemRandom().randrange(2**32)
        self.rng = np.random.default_rng(self.seed)

    def normal(self, *shape, dtype=np.float32):
        return (self.rng.normal(size=shape) * 2 + 0.25).astype(dtype)


class Structs(PackageTest):
    def test_layouts_are_those_of_the_compiler(self):
        from tierkv import _engine as engine
        from tierkv import _library as lib
        structs = {"tkv_error": lib.Error, "tkv_buffer": lib.Buffer, "tkv_page_format": lib.PageFormatStruct,
                   "tkv_page_choice": lib.PageChoiceStruct, "tkv_tokens": lib.Tokens, "tkv_codes": lib.Codes,
                   "tkv_codebook_spec": lib.CodebookSpec, "tkv_block_shape": lib.BlockShape,
                   "tkv_container_info": lib.ContainerInfo, "tkv_sequence_info": lib.SequenceInfo, "tkv_layer": lib.LayerStruct,
                   "tkv_progress": lib.ProgressStruct, "tkv_analyze_options": lib.AnalyzeOptions,
                   "tkv_calibrate_options": lib.CalibrateOptions, "tkv_compress_options": lib.CompressOptions,
                   "tkv_decompress_options": lib.DecompressOptions, "tkv_tier_format": lib.TierFormatStruct,
                   "tkv_channel_config": lib.ChannelConfigStruct,
                   "tkv_significance_call": lib.SignificanceCall,
                   "tkv_rope": lib.RopeStruct, "tkv_coded_format": lib.CodedFormatStruct, "tkv_tier_class": lib.TierClassStruct,
                   "tkv_tiers_format": lib.TiersFormatStruct, "tkv_kv_config": lib.KvConfigStruct,
                   "tkv_kv_append_call": lib.KvAppendCall, "tkv_kv_attend_call": lib.KvAttendCall, "tkv_kv_range": lib.KvRange,
                   "tkv_kv_usage": lib.KvUsage,
                   "tkv_profile_data": lib.ProfileData,
                   "tkv_engine_config": engine.EngineConfigStruct, "tkv_engine_layer": engine.EngineLayerStruct,
                   "tkv_engine_tokens": engine.EngineTokensStruct, "tkv_engine_batch": engine.EngineBatchStruct,
                   "tkv_engine_queries": engine.EngineQueriesStruct, "tkv_engine_ranges": engine.EngineRangesStruct}
        # Attention over caller-owned pages is for C and C++.
        unused = {"tkv_attention_tier", "tkv_attention_config", "tkv_page_table", "tkv_page_pool", "tkv_attention_tail", "tkv_attend_call",
                  "tkv_merge_call", "tkv_sink_call"}
        names = ("tierkv_c.h", "tierkv_attention_c.h", "tierkv_kv_c.h", "tierkv_engine_c.h", "tierkv_dumps_c.h")
        headers = "".join((pathlib.Path(ROOT) / "include/tierkv" / h).read_text() for h in names)
        self.assertEqual(set(re.findall(r"^} (tkv_\w+);", headers, re.M)), set(structs) | unused)
        lines = ['#include <stdio.h>', *(f'#include "tierkv/{h}"' for h in names), "int main(void) {"]
        for name, struct in structs.items():
            lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
            lines += [f'printf("{name}.{f[0]} %zu\\n", offsetof({name}, {f[0]}));' for f in struct._fields_]
        source = self.dir / "layout.c"
        source.write_text("\n".join(lines + ["return 0; }"]))
        subprocess.run(["cc", f"-I{ROOT}/include", source, "-o", self.dir / "layout"], check=True)
        told = dict(l.split() for l in subprocess.run([self.dir / "layout"], capture_output=True, text=True).stdout.splitlines())
        import ctypes
        for name, struct in structs.items():
            self.assertEqual(int(told[name]), ctypes.sizeof(struct), name)
            for field, *_ in struct._fields_:
                self.assertEqual(int(told[f"{name}.{field}"]), getattr(struct, field).offset, f"{name}.{field}")

    def test_version(self):
        cmake = (pathlib.Path(ROOT) / "CMakeLists.txt").read_text()
        self.assertEqual(tierkv.__version__, re.search(r"project\(tierkv VERSION (\S+)", cmake).group(1))


class Codec(PackageTest):
    def test_quantize_equals_numpy(self):
        for head_dim, group, bits in ((128, 0, 4), (96, 32, 2), (64, 16, 8), (7, 0, 1)):
            x = self.normal(33, head_dim)
            rows = tierkv.quantize(x, bits, group)
            grouped = x.reshape(33, -1, group or head_dim)
            low, high = grouped.min(-1), grouped.max(-1)
            scale = ((high - low) / np.float32(2**bits - 1)).astype(np.float16)
            zero = low.astype(np.float16)
            np.testing.assert_array_equal(rows.scale, scale, f"seed {self.seed}")
            np.testing.assert_array_equal(rows.zero_point, zero)
            s, z = scale.astype(np.float32)[..., None], zero.astype(np.float32)[..., None]
            codes = np.clip(np.rint((grouped - z) / s), 0, 2**bits - 1)
            np.testing.assert_array_equal(rows.codes, codes.reshape(33, head_dim))
            np.testing.assert_array_equal(tierkv.dequantize(rows), (s * codes + z).reshape(33, head_dim).astype(np.float32))

    def test_pages(self):
        for head_dim in (64, 96, 128, 256):
            format = tierkv.PageFormat(head_dim, k_bits=16, v_bits=4)
            n = format.tokens
            k, v = self.normal(n, head_dim, dtype=np.float16), self.normal(n, head_dim, dtype=np.float16)
            page = tierkv.encode(format, k[:5], v[:5], np.full(5, 0.25), np.arange(100, 105))
            page.append(k[5:], v[5:])
            back = tierkv.decode(page)
            np.testing.assert_array_equal(back.k, k.astype(np.float32), f"seed {self.seed}")
            np.testing.assert_array_equal(back.v, tierkv.dequantize(tierkv.quantize(v, 4)), f"seed {self.seed}")
            np.testing.assert_array_equal(back.positions, [*range(100, 105), *range(5, n)])
            np.testing.assert_array_equal(back.scores, [0.25] * 5 + [0] * (n - 5))
            with self.assertRaises(tierkv.InvalidArgumentError):
                page.append(k[:1], v[:1])
            self.assertEqual(page.used, n)
        choice = tierkv.choose_page_bytes([tierkv.PageFormat(128, 8, 4), tierkv.PageFormat(128, 4, 2)])
        self.assertEqual((choice.page_bytes, choice.within_limit), (13312, True))

    def test_codebooks(self):
        codes = np.rint(self.rng.normal(size=(50, 96)) * 4).astype(np.int64)
        codes[3, 3] = -32000  # an exception; with -32768 its difference might not fit 16 bits, and the block were raw
        book = tierkv.Codebook.build(codes, "value")
        again = tierkv.Codebook.parse(bytearray(bytes(book)))
        data = book.encode(codes)
        self.assertLess(len(data), codes.size)
        np.testing.assert_array_equal(again.decode(data, codes.shape), codes, f"seed {self.seed}")
        with self.assertRaises(tierkv.CorruptError):
            again.decode(data[:-1], codes.shape)
        with self.assertRaises(tierkv.TierkvError):
            tierkv.Codebook.parse(b"\x00" * 40)
        with self.assertRaises(ValueError):
            book.encode(codes + 32767)
        with self.assertRaises(ValueError):
            book.decode(data, (65, 96))
        with again:
            pass
        self.assertRaisesRegex(tierkv.InvalidArgumentError, "codebook is closed", again.encode, codes)

    def test_what_is_refused(self):
        x = self.normal(4, 64)
        read_only = np.frombuffer(tierkv.Page.empty(tierkv.PageFormat(64)).data.tobytes(), np.uint8)
        for call, error, words in (
                (lambda: tierkv.quantize(x.astype(np.float64), 4), TypeError, "float64"),
                (lambda: tierkv.quantize(x, 9), tierkv.InvalidArgumentError, "bits"),
                (lambda: tierkv.quantize(x, 4, 5), ValueError, "group 5"),
                (lambda: tierkv.quantize(x[0], 4), ValueError, "shape"),
                (lambda: tierkv.quantize(np.full((2, 64), np.nan, np.float32), 4), tierkv.NonFiniteError, "token 0"),
                (lambda: tierkv.quantize(np.full((2, 64), 1e9, np.float32), 4), tierkv.OutOfRangeError, "fp16"),
                (lambda: tierkv.encode(tierkv.PageFormat(64), x, x[:2]), ValueError, "shape"),
                (lambda: tierkv.encode(tierkv.PageFormat(64), x, x.astype(np.float16)), TypeError, "float16"),
                (lambda: tierkv.encode(tierkv.PageFormat(64, k_bits=3), x, x), tierkv.InvalidArgumentError, ""),
                (lambda: tierkv.choose_page_bytes([tierkv.PageFormat(64)], max_waste=0), tierkv.InvalidArgumentError, "max_waste"),
                (lambda: tierkv.choose_page_bytes([tierkv.PageFormat(64)], min_tokens=0), tierkv.InvalidArgumentError, "min_tokens"),
                (lambda: tierkv.Codebook.build(np.zeros((4, 64), np.int16), max_length=0), tierkv.InvalidArgumentError, "max_length"),
                (lambda: tierkv.PageFormat(80).tokens, tierkv.TierkvError, "head_dim"),
                (lambda: tierkv.Page(tierkv.PageFormat(64), read_only).append(x, x), ValueError, "not writable"),
                (lambda: tierkv.Container("/nowhere"), OSError, "/nowhere"),
                (lambda: tierkv.Container.from_bytes(b"no container"), tierkv.InvalidArgumentError, "bytes"),
                (lambda: tierkv.Container.from_bytes("no bytes"), tierkv.ArgumentTypeError, "data"),
                (lambda: tierkv.Container(None), tierkv.ArgumentTypeError, "path"),
                (lambda: tierkv.Codebook.parse("no bytes"), tierkv.ArgumentTypeError, "data"),
                (lambda: tierkv.analyze(SAMPLE, ["k8v5"]), tierkv.InvalidArgumentError, "k8v5"),
                (lambda: tierkv.analyze(SAMPLE, []), ValueError, "presets"),
                (lambda: tierkv.analyze([]), tierkv.InvalidArgumentError, "files"),
                (lambda: tierkv.analyze(SAMPLE, [3]), tierkv.ArgumentTypeError, "presets: 3"),
                (lambda: tierkv.analyze(3, ["fp16"]), tierkv.ArgumentTypeError, "files: 3"),
                (lambda: tierkv.analyze([SAMPLE, None]), tierkv.ArgumentTypeError, "files: None"),
                (lambda: tierkv.analyze(SAMPLE, ["fp16"], layers=(0, 6)), tierkv.TierkvError, "layer"),
                (lambda: tierkv.analyze(SAMPLE, ["fp16\0"]), tierkv.InvalidArgumentError, "presets"),
                (lambda: tierkv.analyze(SAMPLE, ["fp16"], layers=(1,)), tierkv.ArgumentTypeError, "layers"),
                (lambda: tierkv.analyze(SAMPLE, ["fp16"], layers=(2, 1)), tierkv.InvalidArgumentError, "layers"),
                (lambda: tierkv.analyze(SAMPLE, ["fp16"], sequence=3), tierkv.ArgumentTypeError, "sequence: 3"),
                (lambda: tierkv.calibrate(SAMPLE, "/nowhere/x", model_id="a\0b"), tierkv.InvalidArgumentError, "model_id"),
                (lambda: tierkv.calibrate(SAMPLE, "/nowhere/x", model_id="\udcff"), tierkv.InvalidArgumentError, "model_id"),
                (lambda: tierkv.compress(SAMPLE, "/nowhere/x", None), tierkv.ArgumentTypeError, "preset: None"),
                (lambda: tierkv.compress(SAMPLE, "/nowhere/x", "step"), OSError, "/nowhere")):
            with self.assertRaises(error) as caught:
                call()
            self.assertIn(words, str(caught.exception))
            self.assertIsInstance(caught.exception, tierkv.TierkvError)
        self.assertEqual(tierkv.CorruptError.name, "corrupt")

    def test_names_hide_no_others(self):
        self.assertEqual(set(tierkv.__all__) & set(dir(builtins)), set())
        self.assertEqual(sorted(tierkv.__all__), sorted(set(tierkv.__all__)))
        self.assertEqual(set(tierkv.__all__) & {module.name for module in pkgutil.iter_modules(tierkv.__path__)}, set())
        for name in tierkv.__all__:
            self.assertTrue(hasattr(tierkv, name), name)

    def test_errors_are_also_the_built_in_ones(self):
        for error, builtin in ((tierkv.OutOfMemoryError, MemoryError), (tierkv.OutOfPagesError, MemoryError),
                               (tierkv.InvalidArgumentError, ValueError), (tierkv.InputOutputError, OSError),
                               (tierkv.OutOfRangeError, IndexError), (tierkv.NotFoundError, LookupError),
                               (tierkv.StaleSequenceError, LookupError), (tierkv.ArgumentTypeError, TypeError),
                               (tierkv.CorruptError, ValueError), (tierkv.VersionError, ValueError),
                               (tierkv.CudaError, RuntimeError)):
            self.assertTrue(issubclass(error, builtin) and issubclass(error, tierkv.TierkvError), error)

    def test_integers_do_not_wrap(self):
        x, wrong = self.normal(4, 64), 2**32 + 4
        for name, call in (("bits", lambda: tierkv.quantize(x, wrong)), ("k_bits", lambda: tierkv.PageFormat(64, k_bits=wrong).tokens),
                           ("head_dim", lambda: tierkv.PageFormat(2**32 + 64).tokens),
                           ("min_tokens", lambda: tierkv.choose_page_bytes([tierkv.PageFormat(64)], min_tokens=wrong)),
                           ("max_length", lambda: tierkv.Codebook.build(np.zeros((4, 64), np.int16), max_length=wrong)),
                           ("threads", lambda: tierkv.analyze(SAMPLE, ["fp16"], threads=wrong)),
                           ("layers", lambda: tierkv.analyze(SAMPLE, ["fp16"], layers=(2**32, 2**32 + 1))),
                           ("threads", lambda: tierkv.compress(SAMPLE, self.dir / "no.tkv", "fp16", threads=wrong)),
                           ("gzip_level", lambda: tierkv.decompress(SAMPLE, self.dir / "no.h5", gzip_level=wrong))):
            with self.assertRaisesRegex(tierkv.InvalidArgumentError, rf"{name}: 429496\d{{4}} is not in"):
                call()
        self.assertEqual(tierkv.choose_page_bytes(f for f in [tierkv.PageFormat(64)]).page_bytes,
                         tierkv.choose_page_bytes([tierkv.PageFormat(64)]).page_bytes)

    def test_not_contiguous_and_foreign_arrays(self):
        x = self.normal(64, 66)
        np.testing.assert_array_equal(tierkv.quantize(x[:, :64], 4).codes, tierkv.quantize(x[:, :64].copy(), 4).codes)
        np.testing.assert_array_equal(tierkv.quantize(x.T, 4).codes, tierkv.quantize(x.T.copy(), 4).codes)

        class Foreign:  # what a torch tensor is to us
            def __init__(self, array):
                self.array = array

            def __dlpack__(self, *args, **kwargs):
                return self.array.__dlpack__()

            def __dlpack_device__(self):
                return self.array.__dlpack_device__()

        np.testing.assert_array_equal(tierkv.quantize(Foreign(x), 4).codes, tierkv.quantize(x, 4).codes)

    def test_bfloat16_of_torch(self):
        class Tensor(np.ndarray):  # a bfloat16 tensor shows its bits through view(torch.int16) alone
            dtype = "torch.bfloat16"

            def view(self, kind):
                assert kind == "int16"
                return np.asarray(self)

        sys.modules.setdefault("torch", type("torch", (), {"int16": "int16"}))
        x = self.normal(9, 128)
        bits = (x.view(np.uint32) >> 16).astype(np.uint16)  # truncated: exact in bfloat16
        rounded = (bits.astype(np.uint32) << 16).view(np.float32)
        tensor = np.ndarray.view(bits.view(np.int16), Tensor)
        np.testing.assert_array_equal(tierkv.quantize(tensor, 4).codes, tierkv.quantize(rounded, 4).codes)
        page = tierkv.encode(tierkv.PageFormat(128, k_bits=16, v_bits=8, raw_dtype="bfloat16"), tensor, tensor)
        np.testing.assert_array_equal(tierkv.decode(page).k, rounded)


class Containers(PackageTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.path = cls.dir / "cäche.tkv"
        cls.compressed = tierkv.compress(SAMPLE, cls.path, "diffkv:alpha_l=0.05")

    def test_summary(self):
        self.assertEqual(self.compressed.file_bytes, self.path.stat().st_size)
        self.assertEqual(self.compressed.values, 2 * 6 * 2 * 1024 * 128)
        self.assertEqual(sum(self.compressed.tokens.values()), 6 * 2 * 1024)
        self.assertGreater(self.compressed.tokens["pruned"], 0)
        result = tierkv.analyze(SAMPLE, ["diffkv:alpha_l=0.05"])[0]
        # The container adds its index and headers to what analyze counts.
        self.assertLess(abs(self.compressed.bits_per_value / result.bits_per_value - 1), 0.05)

    def test_default_presets_are_those_that_a_file_can_serve(self):
        plain = self.dir / "plain.h5"
        shutil.copy(SAMPLE, plain)
        with h5py.File(plain, "a") as f:
            for sequence in f["seq"].values():
                for layer in sequence["layer"].values():
                    for name in ("q", "q_positions", "significance"):
                        if name in layer:
                            del layer[name]
        some, all_of_them = ({r.preset for r in tierkv.analyze(f, layers=(0, 0))} for f in (plain, SAMPLE))
        self.assertTrue(set() < some < all_of_them, (some, all_of_them))

    def test_layers_equal_the_command(self):
        back = self.dir / "back.h5"
        subprocess.run([TIERKV, "decompress", self.path, back, "--dtype", "float32"], check=True, capture_output=True)
        with tierkv.Container(self.path) as cache, h5py.File(back) as f:
            self.assertEqual((cache.info.num_layers, cache.info.head_dim, cache.info.preset), (6, 128, "diffkv:alpha_l=0.05"))
            sequence = cache.sequences[0]
            group = f[f"seq/{sequence.id}"]
            np.testing.assert_array_equal(sequence.tokens, group["tokens"])
            for i in (0, 5):
                layer = cache.decode_layer(i)
                np.testing.assert_array_equal(layer.k, group[f"layer/{i}/k"])
                np.testing.assert_array_equal(layer.v, group[f"layer/{i}/v"])
                np.testing.assert_array_equal(layer.pruned, np.asarray(group[f"layer/{i}/pruned"]) != 0)
            cache.verify()
            for wrong in (lambda: cache.decode_layer(6), lambda: cache.decode_layer(-1), lambda: cache.decode_layer(0, 1)):
                self.assertRaises(IndexError, wrong)
        self.assertRaises(ValueError, cache.decode_layer, 0)
        cache.close()

    def test_python_decompresses_as_the_command(self):
        tierkv.decompress(self.path, self.dir / "a.h5", dtype="float32")
        with self.assertRaisesRegex(tierkv.UnsupportedError, "/pruned"):
            tierkv.compress(self.dir / "a.h5", self.dir / "a.tkv", "fp16")
        tierkv.compress(SAMPLE, self.dir / "b.tkv", "k8v4")
        tierkv.decompress(self.dir / "b.tkv", self.dir / "b.h5", dtype="float32")
        again = tierkv.compress(self.dir / "b.h5", self.dir / "a.tkv", "fp16")
        self.assertEqual(again.values, self.compressed.values)
        self.assertRaises(ValueError, tierkv.decompress, self.path, self.dir / "a.h5", dtype="float64")

    def test_what_a_closed_cache_gave_stays(self):
        cache = tierkv.Container.from_bytes(self.path.read_bytes())
        tokens, layer = cache.sequences[0].tokens, cache.decode_layer(0)
        norm = np.linalg.norm(layer.k)
        cache.close()
        del cache
        gc.collect()
        self.assertEqual(tokens.size, 1024)
        self.assertEqual(np.linalg.norm(layer.k), norm)

    def test_damage(self):
        data = bytearray(self.path.read_bytes())
        at = int(self.rng.integers(len(data)))
        data[at] ^= 1 << int(self.rng.integers(8))
        with self.assertRaises(tierkv.TierkvError, msg=f"seed {self.seed}, byte {at}"):
            tierkv.Container.from_bytes(bytes(data)).verify()

    def test_threads(self):
        cache = tierkv.Container(self.path)
        expected = cache.decode_layer(2)
        equal = []
        threads = [threading.Thread(target=lambda: equal.append(np.array_equal(cache.decode_layer(2, threads=1).k, expected.k)))
                   for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(equal, [True] * 4)


class Dumps(PackageTest):
    def test_analyze_equals_the_command(self):
        import json
        told = json.loads(subprocess.run([TIERKV, "analyze", "--json", "--preset", "step", "--preset", "k8v4", "--layers", "1-2", SAMPLE],
                                         capture_output=True, text=True, check=True).stdout)["results"]
        results = tierkv.analyze([SAMPLE], ["step", "k8v4"], layers=(1, 2))
        self.assertEqual([r.preset for r in tierkv.analyze(SAMPLE, "k8v4", layers=(1, 1))], ["k8v4", "k8v4"])
        self.assertEqual(len(results), len(told))
        for ours, theirs in zip(results, told):
            for key in ("preset", "seq", "values", "bits_per_value", "page_ratio", "tiers", "attention_rel_error_online"):
                self.assertEqual(getattr(ours, key), theirs[key])
        self.assertIsNone(results[-1].key_coded_bits)

    def test_calibrate_and_progress(self):
        seen = []
        thresholds = tierkv.calibrate(SAMPLE, self.dir / "profile.h5", progress=seen.append)
        self.assertGreater(thresholds.alpha_high, 0)
        self.assertEqual(thresholds.alpha_low, 0)
        self.assertEqual(seen, sorted(seen))
        self.assertTrue(seen and 0 <= seen[0] and seen[-1] <= 1)
        own, shared = (tierkv.analyze(SAMPLE, ["step"], profile=p)[0] for p in (None, self.dir / "profile.h5"))
        self.assertLess(shared.bits_per_value, own.bits_per_value)

    def test_profiles_are_read(self):
        path = self.dir / "read.h5"
        tierkv.calibrate(SAMPLE, path)
        profile = tierkv.read_profile(path)
        for given in (path, str(path), profile):
            np.testing.assert_array_equal(tierkv.StoreConfig(6, 8, 2, 128, 1, 64, profile=given).profile.key_mean, profile.key_mean)
        self.assertRaisesRegex(tierkv.ArgumentTypeError, "profile 3", tierkv.StoreConfig, 6, 8, 2, 128, 1, 64, profile=3)
        self.assertEqual((profile.num_layers, profile.num_kv_heads, profile.head_dim), (6, 2, 128))
        with h5py.File(path) as f:
            self.assertEqual((profile.alpha_high, profile.alpha_low), (f.attrs["alpha_h"], f.attrs["alpha_l"]))
            self.assertEqual(profile.model_id, f.attrs["model_id"].decode())
            for name in ("key_mean", "value_mean", "query_energy"):
                np.testing.assert_array_equal(getattr(profile, name).reshape(12, 128), f[name])
            for name in ("query_trace", "value_signal", "key_scale", "value_scale"):
                np.testing.assert_array_equal(getattr(profile, name).ravel(), f[name])
        np.testing.assert_allclose(profile.query_energy.sum(-1), profile.query_trace, rtol=1e-5)

    def random_profile(self, **fields):
        rows = (3, 2)
        vectors = {name: self.rng.normal(size=(*rows, 8)).astype(np.float32) for name in ("key_mean", "value_mean", "key_mean_before_rope")}
        scalars = {name: self.rng.uniform(0.1, 2, rows) for name in
                   ("query_trace", "value_signal", "key_scale", "value_scale", "key_sensitivity", "value_sensitivity", "joint_sensitivity")}
        given = dict(model_id="modèle", num_layers=3, num_q_heads=4, num_kv_heads=2, head_dim=8, sm_scale=0.5, alpha_high=2.0, alpha_low=0.5,
                     query_energy=self.rng.uniform(0, 1, (*rows, 8)).astype(np.float32), **vectors, **scalars)
        return tierkv.ProfileData(**{**given, **fields})

    def test_profiles_are_written(self):
        path = self.dir / "written.h5"
        ropes = (None, tierkv.Rope("none", 0, np.empty((1, 0))), tierkv.Rope("halves", 6, np.array([1, 0.5, 0.25])),
                 tierkv.Rope("neighbours", 4, np.array([[1, 0.5], [0, 0], [1, 0.25]])))
        for rope in ropes:
            given = self.random_profile(rope=rope)
            tierkv.write_profile(path, given)
            read = tierkv.read_profile(path)
            for name, value in vars(given).items():
                if name == "rope":
                    continue
                np.testing.assert_array_equal(getattr(read, name), value, err_msg=name)
            self.assertEqual(read.rope is None, rope is None)
            if rope is not None:
                self.assertEqual((read.rope.pairing, read.rope.dims), (rope.pairing, rope.dims))
                np.testing.assert_array_equal(read.rope.inv_freq.ravel(), np.asarray(rope.inv_freq).ravel())
        bare = {name: None for name in ("key_mean_before_rope", "query_energy", "key_scale", "value_scale", "key_sensitivity",
                                        "value_sensitivity", "joint_sensitivity")}
        tierkv.write_profile(path, self.random_profile(**bare))
        read = tierkv.read_profile(path)
        np.testing.assert_array_equal(read.key_scale, np.ones((3, 2)))
        self.assertIsNone(read.joint_sensitivity)
        with self.assertRaisesRegex(ValueError, "no joint sensitivities"):
            read.classes([0.1])

    def test_bad_profiles_are_not_written(self):
        path = self.dir / "bad.h5"
        nan = np.full((3, 2), np.nan)
        for error, match, fields in ((ValueError, "key_mean: shape", {"key_mean": np.zeros((3, 2, 7), np.float32)}),
                                     (ValueError, "joint_sensitivity: shape", {"joint_sensitivity": np.ones((2, 3))}),
                                     (ValueError, "rope pairing", {"rope": tierkv.Rope("thirds", 2, np.ones(1))}),
                                     (ValueError, "rope.inv_freq", {"rope": tierkv.Rope("halves", 4, np.ones(1))}),
                                     (tierkv.TierkvError, "rope_layers", {"rope": tierkv.Rope("halves", 4, np.ones((2, 2)))}),
                                     (tierkv.TierkvError, "model_id", {"model_id": ""}), (TypeError, "model_id", {"model_id": 3}),
                                     (tierkv.TierkvError, "key_sensitivity", {"key_sensitivity": nan}),
                                     (tierkv.TierkvError, "value_scale", {"value_scale": np.zeros((3, 2))})):
            with self.assertRaisesRegex(error, match):
                tierkv.write_profile(path, self.random_profile(**fields))
            self.assertFalse(path.exists())

    def test_head_scales_and_classes(self):
        sensitivities = self.rng.uniform(1e-5, 1, (15, 6))
        scales = tierkv.head_scales(sensitivities)
        expected = sensitivities**-0.25
        expected = np.clip(expected / np.exp(np.log(expected).mean()), 1 / 8, 8)
        np.testing.assert_allclose(scales, expected, rtol=1e-12, err_msg=f"seed {self.seed}")
        classes = tierkv.assign_classes([0.1, 0.4], sensitivities)
        self.assertEqual(classes.shape, (15, 6))
        order = np.argsort(-sensitivities.ravel(), kind="stable")
        np.testing.assert_array_equal(classes.ravel()[order], [0] * 9 + [1] * 36 + [2] * 45)
        self.assertRaises(tierkv.InvalidArgumentError, tierkv.head_scales, [1.0, 0.0])

    def test_files_that_are_no_profiles(self):
        self.assertRaises(OSError, tierkv.read_profile, "/nowhere.h5")
        self.assertRaises(tierkv.TierkvError, tierkv.read_profile, SAMPLE)

    def test_what_exists_is_kept(self):
        path, back, profile = self.dir / "kept.tkv", self.dir / "kept.h5", self.dir / "kept_profile.h5"
        calls = (lambda **o: tierkv.compress(SAMPLE, path, "k8v4", **o), lambda **o: tierkv.decompress(path, back, **o),
                 lambda **o: tierkv.calibrate(SAMPLE, profile, thresholds=False, **o))
        for call, out in zip(calls, (path, back, profile)):
            call()
            before = out.read_bytes()
            with self.assertRaisesRegex(tierkv.InputOutputError, f"{out}.*exists"):
                call()
            self.assertEqual(out.read_bytes(), before)
            call(overwrite=True)
            self.assertEqual(out.read_bytes(), before)
        for call, source in ((lambda: tierkv.compress(back, back, "k8v4", overwrite=True), back),
                             (lambda: tierkv.decompress(path, path, overwrite=True), path)):
            before = source.read_bytes()
            with self.assertRaisesRegex(tierkv.InputOutputError, "the same file"):
                call()
            self.assertEqual(source.read_bytes(), before)

    def test_ratios_of_a_file(self):
        whole = tierkv.compress(SAMPLE, self.dir / "whole.tkv", "k8v4")
        bare = tierkv.compress(SAMPLE, self.dir / "bare.tkv", "k8v4", without_queries=True)
        for c, name in ((whole, "whole.tkv"), (bare, "bare.tkv")):
            self.assertEqual(c.file_ratio, 2 * c.values / (self.dir / name).stat().st_size)
        self.assertGreater(whole.carried_bytes, 0)
        self.assertEqual((bare.carried_bytes, bare.ratio), (0, bare.file_ratio))
        self.assertAlmostEqual(whole.ratio, bare.ratio, delta=0.01 * bare.ratio)

    def test_what_progress_raises_is_raised(self):
        calls = []

        def fail(fraction):
            calls.append(fraction)
            raise KeyboardInterrupt("stop")

        self.assertRaisesRegex(KeyboardInterrupt, "stop", tierkv.analyze, SAMPLE, ["fp16"], progress=fail)
        self.assertEqual(len(calls), 1)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"])
