# SPDX-License-Identifier: Apache-2.0
"""convert: kv-dumps to safetensors and back, read and written here by a second implementation of the format."""
import json
import struct

import h5py
import numpy as np

from cli import SAMPLE, CliTest, Dump, main, run

DTYPES = {"F16": np.float16, "F32": np.float32, "I32": np.int32, "BF16": np.uint16, "I64": np.int64}


def read_safetensors(path):
    """({name: array}, metadata); asserts what the format promises."""
    data = path.read_bytes()
    size, = struct.unpack("<Q", data[:8])
    assert size % 8 == 0 and data[8:9] == b"{"
    header = json.loads(data[8:8 + size])
    metadata = header.pop("__metadata__", {})
    data, end, arrays = data[8 + size:], 0, {}
    for name, t in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = t["data_offsets"]
        assert begin == end and begin % np.dtype(DTYPES[t["dtype"]]).itemsize == 0, name
        end = stop
        arrays[name] = np.frombuffer(data[begin:stop], DTYPES[t["dtype"]]).reshape(t["shape"])
    assert end == len(data)
    return arrays, metadata


def write_safetensors(path, tensors, metadata=None, change=None):
    """tensors: {name: (dtype, array)}. `change` may alter the header before it is written."""
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, array) in tensors.items():
        header[name] = dict(dtype=dtype, shape=list(array.shape), data_offsets=[len(data), len(data) + array.nbytes])
        data += array.tobytes()
    if change:
        change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def datasets_of(path):
    """{name: bytes and shape} of every dataset of a dump; without what says how keys are rotated, which may be implied."""
    found = {}
    with h5py.File(path) as f:
        f.visititems(lambda name, d: found.update({name: (d.shape, d.id.get_type().get_size(), d[()].tobytes())})
                     if isinstance(d, h5py.Dataset) else None)
        text = lambda v: v.decode() if isinstance(v, bytes) else v
        found.pop("rope_inv_freq", None)
        attrs = {k: text(v) for k, v in f.attrs.items() if k not in ("created_by", "rope_pairing", "rope_dims")}
        kinds = {s: text(f["seq"][s].attrs.get("kind", "")) for s in f["seq"]}
    return found, attrs, kinds


class Convert(CliTest):
    def convert(self, *args):
        r = run("convert", "--force", *args)
        self.assertEqual(r.returncode, 0, f"seed {self.seed}: {r.stderr}")
        self.assertEqual(r.stdout, "")
        return r.stderr

    def layers(self, tokens=40, heads=2, head_dim=64, count=2, dtype="F16"):
        """A file as another program may have written it."""
        rng = np.random.default_rng(self.seed)
        return {f"cache.{l}.{part}": (dtype, rng.normal(size=(1, heads, tokens, head_dim)).astype(DTYPES[dtype]))
                for l in range(count) for part in ("key", "value")}

    def test_there_and_back_is_the_same_dump(self):
        for source in (SAMPLE, Dump(seed=self.seed, dtype="float32", queries=0).write(self.dir / "f32.h5")):
            for axes in ("htd", "thd", "bhtd", "bthd"):
                there, back = self.dir / "a.safetensors", self.dir / "b.h5"
                self.assertEqual(self.convert(source, there, "--axes", axes), "")
                self.assertEqual(self.convert(there, back, "--axes", axes), "")
                for a, b in zip(datasets_of(source), datasets_of(back)):
                    self.assertEqual(a, b)

    def test_rope_is_carried(self):
        rng = np.random.default_rng(self.seed)
        for pairing, inv_freq in (("halves", rng.random(32)), ("neighbours", rng.random((2, 16)))):
            dump = Dump(seed=self.seed, tokens=30).rotate(inv_freq, pairing)
            source, there, back = dump.write(self.dir / "rope.h5"), self.dir / "a.safetensors", self.dir / "b.h5"
            self.assertEqual(self.convert(source, there), "")
            self.assertEqual(self.convert(there, back), "")
            with h5py.File(back) as f:
                self.assertEqual((f.attrs["rope_pairing"].decode(), int(f.attrs["rope_dims"])), (pairing, 2 * inv_freq.shape[-1]))
                np.testing.assert_array_equal(f["rope_inv_freq"][()], dump.data["/rope_inv_freq"], f"seed {self.seed}")
            for name, bad, words in (("rope_pairing", "thirds", "rope_pairing"), ("rope_dims", "1e3", "rope_dims"), ("rope_dims", "66", "rope_"),
                                     ("rope_inv_freq", "0.5 x", "rope_inv_freq: element 1"), ("rope_inv_freq", "0.5 nan", "rope_"),
                                     ("rope_inv_freq", "0.5", "rope_inv_freq: has 1 numbers")):
                damaged, data = self.dir / "bad.safetensors", there.read_bytes()
                size = struct.unpack("<Q", data[:8])[0]
                header = json.loads(data[8:8 + size])
                header["__metadata__"][name] = bad
                text = json.dumps(header).encode()
                damaged.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size:])
                self.expect(run("convert", damaged, self.dir / "c.h5"), 3, damaged, words)
                self.assertFalse((self.dir / "c.h5").exists())
            back.unlink()

    def test_options_go_before_the_rotation_of_metadata(self):
        there, back = self.dir / "a.safetensors", self.dir / "b.h5"
        source = Dump(seed=self.seed, tokens=30).rotate(np.random.default_rng(self.seed).random(32)).write(self.dir / "rope.h5")
        self.convert(source, there)
        for options, facts in ((("--rope-theta", 5e5), (5e5, 1)), (("--rope-applied", "no"), (1e4, 0))):
            self.convert(there, back, *options)
            with h5py.File(back) as f:
                self.assertEqual((f.attrs["rope_theta"], f.attrs["rope_applied"]), facts)
                self.assertNotIn("rope_pairing", f.attrs)
                self.assertNotIn("rope_inv_freq", f)

    def test_bfloat16_keeps_its_bits(self):
        there, bf16, back = self.dir / "a.safetensors", self.dir / "b.h5", self.dir / "c.safetensors"
        self.convert(SAMPLE, there)
        arrays, metadata = read_safetensors(there)
        rng = np.random.default_rng(self.seed)
        tensors = {}
        for name, a in arrays.items():
            is_f16 = a.dtype == np.float16  # any bits but those of infinities and NaNs
            tensors[name] = ("BF16", rng.integers(0, 0x7f80, a.shape).astype(np.uint16)) if is_f16 else \
                            ("F32" if a.dtype == np.float32 else "I32", a)
        self.assertEqual(self.convert(write_safetensors(there, tensors, metadata), bf16), "")
        self.convert(bf16, back)
        arrays, _ = read_safetensors(back)
        for name, (_, a) in tensors.items():
            self.assertTrue(np.array_equal(arrays[name], a), name)

    def test_safetensors_of_a_dump(self):
        out = self.dir / "a.safetensors"
        self.convert(SAMPLE, out)
        arrays, metadata = read_safetensors(out)
        self.assertEqual((metadata["format"], metadata["kind.notes"], metadata["num_q_heads"]), ("kv-dump", "text", "8"))
        self.assertEqual(float(metadata["sm_scale"]), 128 ** -0.5)
        with h5py.File(SAMPLE) as f:
            for l in range(6):
                for part in ("k", "v", "q", "q_positions", "significance"):
                    self.assertTrue(np.array_equal(arrays.pop(f"seq.notes.layer.{l}.{part}"), f[f"seq/notes/layer/{l}/{part}"][()]))
            self.assertTrue(np.array_equal(arrays.pop("seq.notes.tokens"), f["seq/notes/tokens"][()]))
        self.assertEqual(arrays, {})

    def test_names(self):
        out = self.dir / "a.safetensors"
        self.convert(SAMPLE, out, "--names", "hf")
        arrays, _ = read_safetensors(out)
        self.assertEqual(arrays["past_key_values.5.value"].shape, (1, 2, 1024, 128))
        self.assertIn("input_ids", arrays)
        self.convert(SAMPLE, out, "--names", "m.layers.{layer}.attn.{part}_cache", "--part", "k=key", "--part", "v=val", "--axes", "thd")
        arrays, _ = read_safetensors(out)
        self.assertEqual(arrays["m.layers.0.attn.key_cache"].shape, (1024, 2, 128))
        self.convert(out, self.dir / "b.h5", "--names", "m.layers.{layer}.attn.{part}_cache", "--part", "k=key", "--part", "v=val", "--axes", "thd")
        with h5py.File(SAMPLE) as a, h5py.File(self.dir / "b.h5") as b:
            self.assertTrue(np.array_equal(a["seq/notes/layer/3/v"], b["seq/0/layer/3/v"]))
        for names, words in (("x.{layer}", "{part}"), ("{layer}{part}", "text between"), ("{seq}.{seq}.{layer}.{part}", "at most once"),
                             ("{layer}.{part}.{x}", "begins none")):
            self.expect(run("convert", SAMPLE, out, "--names", names), 3, "--names", words)
        self.expect(run("convert", SAMPLE, out, "--part", "k=v"), 3, "--part", "two parts")
        self.expect(run("convert", SAMPLE, out, "--part", "keys=v"), 3, "--part keys=v")
        self.expect(run("convert", SAMPLE, out, "--tokens-name", "t"), 3, "--tokens-name", "{seq}")

    def test_several_sequences(self):
        dump = Dump(seed=self.seed, tokens=30)
        dump.data.update({k.replace("/seq/a/", "/seq/b.layer.1/"): v.copy() for k, v in dump.data.items()})
        source, out, back = dump.write(self.dir / "two.h5"), self.dir / "a.safetensors", self.dir / "b.h5"
        self.convert(source, out)
        self.convert(out, back)
        self.assertEqual(datasets_of(source)[0], datasets_of(back)[0])
        self.expect(run("convert", "--force", source, out, "--names", "hf"), 3, "2 sequences", "--seq")
        self.convert(source, out, "--names", "hf", "--seq", "a")
        self.expect(run("convert", "--force", source, out, "--seq", "c"), 3, "no sequence 'c'", "--seq")

    def test_what_is_not_carried_over_is_named(self):
        run("compress", "--preset", "diffkv:alpha_l=0.3", SAMPLE, self.dir / "a.tkv")
        run("decompress", self.dir / "a.tkv", self.dir / "a.h5")
        said = self.convert(self.dir / "a.h5", self.dir / "a.safetensors")
        self.assertIn("left out: dataset '/seq/notes/layer/0/pruned'", said)
        self.assertIn("left out: 1 more", said)

    def test_a_foreign_file_and_what_is_assumed(self):
        tensors = self.layers()
        tensors["lm_head"] = ("F32", np.zeros((3, 4), np.float32))
        source = write_safetensors(self.dir / "foreign.safetensors", tensors, {"format": "pt"})
        flags = ["--names", "cache.{layer}.{part}", "--part", "k=key", "--part", "v=value", "--axes", "bhtd"]
        said = self.convert(source, self.dir / "a.h5", *flags)
        for words in ("left out: tensor 'lm_head'", "assumed: num_q_heads = 2", f"assumed: sm_scale = {1 / 8:f}", "tokens of sequence '0'"):
            self.assertIn(words, said)
        with h5py.File(self.dir / "a.h5") as f:
            self.assertTrue(np.array_equal(f["seq/0/layer/1/v"], tensors["cache.1.value"][1][0]))
        self.assertEqual(run("analyze", "--preset", "k4v4", self.dir / "a.h5").returncode, 0)
        said = self.convert(source, self.dir / "a.h5", *flags, "--q-heads", 8, "--sm-scale", 0.5, "--rope-theta", "1e6",
                            "--rope-applied", "no", "--model-id", "mine")
        self.assertEqual(said.count("assumed"), 1)
        with h5py.File(self.dir / "a.h5") as f:
            facts = [f.attrs[k] for k in ("num_q_heads", "sm_scale", "rope_theta", "rope_applied", "model_id")]
            self.assertEqual(facts, [8, 0.5, 1e6, 0, b"mine"])

    def test_token_ids_as_tokenizers_give_them(self):
        source, out = self.dir / "a.safetensors", self.dir / "a.h5"
        tensors = {k.replace("cache", "past_key_values"): v for k, v in self.layers(tokens=3).items()}
        for dtype in ("I32", "I64"):
            for ids in ([7, -1, 2**31 - 1], [[7, -1, 2**31 - 1]]):
                tensors["input_ids"] = (dtype, np.array(ids, DTYPES[dtype]))
                self.convert(write_safetensors(source, tensors), out, "--names", "hf")
                with h5py.File(out) as f:
                    self.assertEqual(list(f["seq/0/tokens"]), [7, -1, 2**31 - 1])
        out.unlink()
        for ids, words in (([7, 2**31, 0], f"element 1 is {2**31}"), ([[7, 0]], "I64 [1, 2] (expected I32 or I64 [3] or [1, 3])"),
                           ([[7], [0], [1]], "I64 [3, 1]")):
            tensors["input_ids"] = ("I64", np.array(ids))
            self.expect(run("convert", write_safetensors(source, tensors), out, "--names", "hf"), 3, source, "'input_ids'", words)
            self.assertFalse(out.exists())

    def refused(self, tensors, *words, change=None, metadata=None):
        source = write_safetensors(self.dir / "bad.safetensors", tensors, metadata, change)
        out = self.dir / "out.h5"
        self.expect(run("convert", source, out, "--names", "cache.{layer}.{part}", "--part", "k=key", "--part", "v=value", "--axes", "bhtd"),
                    3, source, *words)
        self.assertEqual(list(self.dir.glob("out*")), [])

    def test_what_is_no_cache_is_refused(self):
        self.refused({}, "no tensor is called")
        self.refused({"x": ("F16", np.zeros(4, np.float16))}, "the first is 'x'")
        for missing, words in (("cache.0.key", "cache.0.key' is missing"), ("cache.1.value", "cache.1.value' is missing")):
            self.refused({k: v for k, v in self.layers().items() if k != missing}, words)
        self.refused({k: v for k, v in self.layers(count=3).items() if "1" not in k}, "cache.1.key' is missing")
        for name, array, words in (("cache.1.key", np.zeros((1, 2, 39, 64), np.float16), "39"),
                                   ("cache.1.key", np.zeros((2, 40, 64), np.float16), "expected [1, heads"),
                                   ("cache.0.key", np.zeros((1, 2, 0, 64), np.float16), "0 tokens"),
                                   ("cache.0.key", np.zeros((1, 0, 40, 64), np.float16), "0 heads"),
                                   ("cache.1.value", np.full((1, 2, 40, 64), np.nan, np.float16), "not finite")):
            self.refused({**self.layers(), name: ("F16", array)}, words)
        self.refused({**self.layers(), "cache.1.key": ("F32", np.zeros((1, 2, 40, 64), np.float32))}, "is F32")
        self.refused({k: ("I64", v.astype(np.int64)) for k, (_, v) in self.layers().items()}, "is I64")
        self.refused({**self.layers(), "cache.0.q": ("F16", np.zeros((1, 4, 8, 64), np.float16))}, "q_positions' is missing")
        self.refused(self.layers(), "num_q_heads", metadata={"format": "kv-dump", "num_q_heads": "many"})

    def test_damaged_headers(self):
        def offsets(name, begin, end):
            return lambda h: h[name].update(data_offsets=[begin, end])
        size = 2 * 2 * 40 * 64
        for change, words in ((offsets("cache.0.key", 0, size + 2), "its shape takes"), (offsets("cache.0.value", 0, size), "inside another"),
                              (offsets("cache.1.value", 4 * size, 5 * size), "behind a hole"), (offsets("cache.0.key", size, 0), "before it begins"),
                              (lambda h: h.pop("cache.1.value"), "the file holds"), (lambda h: h["cache.0.key"].pop("dtype"), "no dtype"),
                              (lambda h: h["cache.0.key"].update(dtype="F17"), "unknown dtype 'F17'"),
                              (lambda h: h["cache.0.key"].update(shape=[2**40, 2**40]), "overflows"),
                              (lambda h: h["cache.0.key"].update(shape=[-1]), "negative"), (lambda h: h["cache.0.key"].update(shape=[1.5]), "no integer"),
                              (lambda h: h["cache.0.key"].update(more=1), "unknown field 'more'"),
                              (lambda h: h.update(__metadata__={"a": 1}), "unexpected"), (lambda h: h.update(x=[]), "unexpected")):
            self.refused(self.layers(), words, change=change)
        good = write_safetensors(self.dir / "good.safetensors", self.layers()).read_bytes()
        bad = self.dir / "cut.safetensors"
        for content, words in ((b"", "too short"), (good[:7], "too short"), (good[:100], "truncated"), (good[:-1], "the file holds"),
                               (good + b"x", "the file holds"), (struct.pack("<Q", 2**40) + good[8:], "not a safetensors file"),
                               (struct.pack("<Q", 1) + b" ", "begin with '{'"), (struct.pack("<Q", 2) + b"{x", "no JSON"),
                               (struct.pack("<Q", 3) + b"{}}", "no JSON"), (struct.pack("<Q", 0), "begin with '{'")):
            bad.write_bytes(content)
            self.expect(run("convert", bad, self.dir / "out.h5"), 3, bad, words)

    def test_usage(self):
        out = self.dir / "a.safetensors"
        self.expect(run("convert", SAMPLE, self.dir / "a.h5"), 3, "already", "OUT")
        self.expect(run("convert", SAMPLE, self.dir / "a.txt"), 3, "OUT", "must end in")
        self.expect(run("convert", SAMPLE), 2, "OUT")
        self.expect(run("convert", SAMPLE, out, "--axes", "dht"), 3, "--axes")
        self.expect(run("convert", self.dir / "none.h5", out), 3, "none.h5")
        self.expect(run("convert", self.dir / "none.safetensors", self.dir / "a.h5"), 3, "none.safetensors")
        for option, value in (("--q-heads", 8), ("--sm-scale", 1), ("--rope-theta", 1e4), ("--rope-applied", "no"), ("--model-id", "m")):
            self.expect(run("convert", SAMPLE, out, option, value), 2, option)
        self.convert(SAMPLE, out)
        self.expect(run("convert", out, self.dir / "a.h5", "--seq", "notes"), 2, "--seq")
        self.expect(run("convert", out, self.dir / "a.h5", "--q-heads", "x"), 3, "--q-heads")
        self.expect(run("convert", out, self.dir / "a.h5", "--q-heads", "3"), 3, "expected 3 heads")
        self.expect(run("convert", SAMPLE, self.dir / "no" / "a.safetensors"), 3, "cannot be created")


if __name__ == "__main__":
    main()
