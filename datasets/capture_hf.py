# SPDX-License-Identifier: Apache-2.0
"""Dumps the KV cache of a Hugging Face causal language model: keys, values, queries and exact significance, as a kv-dump.

    python3 datasets/capture_hf.py --model MODEL --prompt notes.txt --prompt code.py --out dump.h5

Needs torch, transformers 5, h5py. How it works, and for which models: docs/guides/capture.md.
"""
from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import shutil
import sys
from typing import Any, Optional

import h5py
import numpy as np
import torch
import transformers
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from hf_rope import Rope, UnknownRope, difference, rope_of, rounding

NAME = "tierkv_capture"
PROBED_POSITIONS = 16
BLOCK_BYTES = 256 << 20  # of attention weights at a time
DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


class CaptureError(Exception):
    """What keeps a model or prompt from being captured."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    id: str
    kind: str
    tokens: np.ndarray  # int32 [T]


@dataclasses.dataclass(frozen=True)
class Shape:
    """What all layers of a dump share."""

    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    sm_scale: float


# ---- Attention, with the significance of every token ----


def block_weights(q: torch.Tensor, k: torch.Tensor, first: int, mask: Optional[torch.Tensor], extras: "Extras") -> torch.Tensor:
    """Attention weights of queries first, first + 1, ... in float32.

    q [Hq, B, D], k [Hkv, T, D]; mask [1 or Hq, B, T], bool (True: attend) or additive, None: causal. Returns [Hkv, Hq / Hkv, B, T].
    """
    heads, rows, _ = q.shape
    kv_heads, tokens, _ = k.shape
    grouped = q.float().reshape(kv_heads, heads // kv_heads * rows, -1)
    logits = (torch.bmm(grouped, k.float().transpose(1, 2)) * extras.scaling).reshape(heads, rows, tokens)
    if extras.softcap is not None:
        logits = torch.tanh(logits / extras.softcap) * extras.softcap
    if mask is None:
        positions = torch.arange(tokens, device=q.device)
        mask = positions[None, None, :] <= positions[None, first:first + rows, None]
    logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.float()
    if extras.sinks is not None:  # a learned logit per head that takes weight and gives no value
        sinks = extras.sinks.float().reshape(heads, 1, 1).expand(heads, rows, 1)
        weights = torch.softmax(torch.cat([logits, sinks], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(logits, -1)
    return weights.reshape(kv_heads, heads // kv_heads, rows, tokens)


@dataclasses.dataclass(frozen=True)
class Extras:
    scaling: float
    softcap: Optional[float]
    sinks: Optional[torch.Tensor]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Optional[torch.Tensor],
           extras: Extras) -> "tuple[torch.Tensor, torch.Tensor]":
    """Output [Hq, T, D] in q's dtype, and significance [Hkv, T] in float64, block by block of queries.

    sig_i = 1 / (T - i) * sum over later queries j of max over the group's heads of their weight on i, i counted from 1; 0 for
    the last token.
    """
    heads, tokens, _ = q.shape
    kv_heads = k.shape[0]
    rows = max(1, min(tokens, BLOCK_BYTES // (4 * heads * tokens)))
    out = torch.empty_like(q)
    total = torch.zeros(kv_heads, tokens, dtype=torch.float64, device=q.device)
    for first in range(0, tokens, rows):
        last = min(first + rows, tokens)
        block = None if mask is None else mask[:, first:last]
        weights = block_weights(q[:, first:last], k, first, block, extras)
        result = torch.bmm(weights.reshape(kv_heads, -1, tokens), v.float())
        out[:, first:last] = result.reshape(heads, last - first, -1).to(q.dtype)
        best = weights.amax(1)  # [Hkv, B, T]
        own = torch.arange(first, last, device=q.device)
        best[:, own - first, own] = 0  # a query does not count for itself
        total += best.sum(1, dtype=torch.float64)
    later = torch.arange(tokens - 1, -1, -1, dtype=torch.float64, device=q.device)
    return out, total / later.clamp(min=1)


class Recorder:
    """The attention function: computes attention, and hands every layer to `sink` as it happens."""

    sink: Any = None  # a DumpFile
    keys: "Optional[list[torch.Tensor]]" = None  # takes the keys of each layer, and nothing else happens: tokens attend to themselves

    def __call__(self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                 attention_mask: Optional[torch.Tensor], scaling: Optional[float] = None, softcap: Optional[float] = None,
                 s_aux: Optional[torch.Tensor] = None, is_causal: Optional[bool] = None, position_bias: Optional[torch.Tensor] = None,
                 **kwargs: Any) -> "tuple[torch.Tensor, None]":
        name = type(module).__name__
        if position_bias is not None:
            raise CaptureError(f"{name}: a learned position bias is not supported")
        if is_causal is False or getattr(module, "is_causal", True) is False:
            raise CaptureError(f"{name}: not causal")
        if self.keys is not None:
            self.keys.append(key)
            return value.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(1, 2).contiguous(), None
        if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
            raise CaptureError(f"{name}: {query.shape[2]} queries for {key.shape[2]} keys: layers that share a cache are not supported")
        if key.shape != value.shape or query.shape[3] != key.shape[3]:
            raise CaptureError(f"{name}: keys {tuple(key.shape[1:])} and values {tuple(value.shape[1:])} differ in shape")
        extras = Extras(query.shape[-1] ** -0.5 if scaling is None else float(scaling), softcap, s_aux)
        mask = None if attention_mask is None else attention_mask[0]
        out, significance = attend(query[0], key[0], value[0], mask, extras)
        self.sink.add_layer(query[0], key[0], value[0], significance, extras.scaling, name)
        return out.transpose(0, 1).unsqueeze(0).contiguous(), None


RECORDER = Recorder()


def register() -> None:
    """Makes NAME an attention implementation; the same name for the mask, or the attention function would get none."""
    AttentionInterface.register(NAME, RECORDER)
    AttentionMaskInterface.register(NAME, sdpa_mask)


# ---- The dump ----


def bfloat16_type() -> h5py.h5t.TypeID:
    """16 bits, little-endian: sign 1, exponent 8, mantissa 7."""
    t = h5py.h5t.IEEE_F32LE.copy()
    t.set_fields(15, 7, 8, 0, 7)
    t.set_precision(16)
    t.set_ebias(127)
    t.set_size(2)
    return t


class DumpFile:
    """A kv-dump v1 that is written layer by layer, under a temporary name until close()."""

    def __init__(self, path: pathlib.Path, queries: int, gzip: int, overwrite: bool = True) -> None:
        self.path = path
        self.part = path.with_name(f"{path.name}.{os.getpid()}.part")
        self.queries = queries
        self.gzip = gzip
        self.overwrite = overwrite
        self.file = h5py.File(self.part, "x")
        self.shape: Optional[Shape] = None
        self.num_layers = 0
        self.sequence: Any = None
        self.layer = 0
        self.on_layer = lambda layer: None

    def begin_sequence(self, prompt: Prompt) -> None:
        self.sequence = self.file.create_group(f"seq/{prompt.id}")
        self.sequence.attrs["kind"] = np.bytes_(prompt.kind)
        self.sequence["tokens"] = prompt.tokens
        self.layer = 0

    def end_sequence(self) -> None:
        if self.layer == 0:
            raise CaptureError("the model does not call the attention interface of transformers")
        if self.num_layers not in (0, self.layer):
            raise CaptureError(f"{self.layer} layers of attention, {self.num_layers} in the sequences before")
        self.num_layers = self.layer

    def add_layer(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, significance: torch.Tensor, sm_scale: float,
                  name: str) -> None:
        if k.dtype not in DTYPES:
            raise CaptureError(f"layer {self.layer}: {k.dtype} is not one of {', '.join(DTYPES.values())}")
        shape = Shape(q.shape[0], k.shape[0], k.shape[2], k.dtype, sm_scale)
        if self.shape is not None and shape != self.shape:
            raise CaptureError(f"layer {self.layer} ({name}) has {shape}, those before {self.shape}; a kv-dump has one shape")
        self.shape = shape
        group = self.sequence.create_group(f"layer/{self.layer}")
        tokens = k.shape[1]
        count = tokens if self.queries < 0 else min(self.queries, tokens)
        self._values(group, "k", k)
        self._values(group, "v", v)
        if count > 0:
            self._values(group, "q", q[:, tokens - count:])
            group["q_positions"] = np.arange(tokens - count, tokens, dtype=np.int32)
        group["significance"] = significance.to(torch.float32).cpu().numpy()
        self.layer += 1
        self.on_layer(self.layer)

    def _values(self, group: h5py.Group, name: str, x: torch.Tensor) -> None:
        if not torch.isfinite(x).all():
            raise CaptureError(f"layer {self.layer}: {name} is not finite")
        x = x.detach().cpu().contiguous()
        options: "dict[str, Any]" = dict(chunks=(1, min(256, x.shape[1]), x.shape[2]))
        if self.gzip:
            options.update(compression="gzip", compression_opts=self.gzip, shuffle=True)
        if x.dtype == torch.bfloat16:
            kind = bfloat16_type()
            data = group.create_dataset(name, tuple(x.shape), h5py.Datatype(kind), **options)
            data.id.write(h5py.h5s.ALL, h5py.h5s.ALL, x.view(torch.int16).numpy(), kind)
        else:
            group.create_dataset(name, data=x.numpy(), **options)

    def close(self, model_id: str, rope: Optional[Rope], theta: Optional[float]) -> None:
        """rope None: keys are rotated, it is not known how. theta: the base of plain RoPE."""
        assert self.shape is not None
        s = self.shape
        self.file.attrs.update(
            format=np.bytes_("kv-dump"), format_version=1, model_id=np.bytes_(model_id), num_layers=self.num_layers,
            num_q_heads=s.q_heads, num_kv_heads=s.kv_heads, head_dim=s.head_dim, dtype=np.bytes_(DTYPES[s.dtype]),
            rope_applied=int(rope is None or rope.pairing != "none"), sm_scale=s.sm_scale,
            created_by=np.bytes_(f"capture_hf.py (transformers {transformers.__version__}, torch {torch.__version__})"))
        if rope is not None:
            self.file.attrs["rope_pairing"] = np.bytes_(rope.pairing)
            if theta is not None and rope.pairing != "none":
                self.file.attrs["rope_theta"] = theta
            if rope.pairing != "none":
                self.file.attrs["rope_dims"] = rope.dims
                self.file["rope_inv_freq"] = rope.inv_freq
        self.file.close()
        if self.path.exists() and self.overwrite:
            shutil.copymode(self.path, self.part)
        elif not self.overwrite:
            self.claim()
        os.replace(self.part, self.path)

    def claim(self) -> None:
        """Creates the output, empty, where nothing is at its path."""
        try:
            self.path.touch(exist_ok=False)
        except FileExistsError as e:
            raise CaptureError(f"{self.path}: exists already; --force replaces it") from e

    def discard(self) -> None:
        self.file.close()
        self.part.unlink(missing_ok=True)


# ---- Model and prompts ----


def theta_of(config: Any) -> Optional[float]:
    """The base of RoPE where it is the same for all layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    theta = parameters.get("rope_theta")
    return None if theta is None else float(theta)


def load_model(name: str, dtype: str, device: str) -> Any:
    try:
        torch.zeros(1, device=device).cpu()
    except (AssertionError, ImportError, RuntimeError, ValueError) as e:
        raise CaptureError(f"--device {device}: {first_line(e)}") from e
    register()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype if dtype == "auto" else getattr(torch, dtype), attn_implementation=NAME)
    except Exception as e:  # damaged files raise classes of safetensors and others
        why = "it does not call the attention interface of transformers" if str(e) == repr(NAME) else e
        raise CaptureError(f"{name}: transformers cannot load it: {why}") from e
    return model.to(device).eval()


def first_line(e: BaseException) -> str:
    return str(e).split("\n")[0] or type(e).__name__


def keys_of(model: Any, ids: torch.Tensor, **options: Any) -> "list[torch.Tensor]":
    RECORDER.keys = []
    try:
        with torch.inference_mode():
            model.base_model(input_ids=ids, use_cache=False, **options)
        return RECORDER.keys
    finally:
        RECORDER.keys = None


def keys_by_position(model: Any, token: int, layers: int) -> "list[torch.Tensor]":
    """Keys of one token at positions 0, 1, ..., per layer: sequences of one token each where positions can be given, else one of all.

    In the latter, layers that are no attention but look back make keys differ by more than position.
    """
    ids = torch.full((PROBED_POSITIONS, 1), token, device=model.device)
    try:
        apart = [k[:, :, 0].transpose(0, 1) for k in keys_of(model, ids, position_ids=torch.arange(PROBED_POSITIONS, device=model.device)[:, None])]
        if len(apart) == layers and any(difference(k.float()) > rounding(k) for k in apart):
            return apart
    except (IndexError, RuntimeError, TypeError, ValueError):
        pass
    try:
        together = [k[0] for k in keys_of(model, ids.T)]
    except (IndexError, RuntimeError, TypeError, ValueError) as e:
        raise UnknownRope(f"{PROBED_POSITIONS} equal tokens do not run: {e}") from e
    if len(together) != layers:
        raise UnknownRope(f"{len(together)} of {layers} layers ran")
    return together


def capture(model: Any, prompts: "list[Prompt]", dump: DumpFile, model_id: str, progress: Any = None) -> Optional[str]:
    """Runs every prompt through the model once and closes the dump; discards it where that fails.

    Returns why the dump does not tell how keys are rotated, where it does not.
    """
    RECORDER.sink = dump
    rope: Optional[Rope] = None
    unknown = None
    try:
        for prompt in prompts:
            if prompt.tokens.size == 0:
                raise CaptureError(f"{prompt.id}: no tokens")
            known = model.get_input_embeddings().weight.shape[0]
            if not 0 <= prompt.tokens.min() <= prompt.tokens.max() < known:
                raise CaptureError(f"{prompt.id}: its tokens are {prompt.tokens.min()} to {prompt.tokens.max()}, the model knows {known}")
            dump.on_layer = lambda layer, p=prompt: progress(p, layer) if progress else None
            dump.begin_sequence(prompt)
            ids = torch.from_numpy(prompt.tokens.astype(np.int64)).unsqueeze(0).to(model.device)
            with torch.inference_mode():
                # The base model: the cache does not depend on the head, and its logits may be larger than the cache.
                model.base_model(input_ids=ids, use_cache=False)
            dump.end_sequence()
        assert dump.shape is not None
        try:
            rope = rope_of(model, keys_by_position(model, int(prompts[0].tokens[-1]), dump.num_layers))
        except UnknownRope as e:
            unknown = str(e)
        dump.close(model_id, rope, theta_of(model.config.get_text_config()))
        return unknown
    except BaseException:
        dump.discard()
        raise
    finally:
        RECORDER.sink = None


def dumped_prompts(path: pathlib.Path) -> "list[tuple[str, str, np.ndarray]]":
    """Name, kind and tokens of each sequence of a kv-dump."""
    try:
        with h5py.File(path) as f:
            found = [(name, bytes(np.bytes_(g.attrs.get("kind", b""))).decode(), g["tokens"][:]) for name, g in f["seq"].items()]
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as e:
        raise CaptureError(f"{path}: cannot be read as a kv-dump: {e}") from e
    if not found or any(t.ndim != 1 or t.dtype.kind not in "iu" for _, _, t in found):
        raise CaptureError(f"{path}: not a kv-dump: no sequences, or tokens that are no list of integers")
    return found


def load_tokenizer(name: str) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except Exception as e:  # damaged files raise Exception itself
        raise CaptureError(f"{name}: transformers cannot load its tokenizer: {e}") from e


def read_prompts(paths: "list[pathlib.Path]", tokenizer: str, limit: Optional[int]) -> "list[Prompt]":
    """One sequence per file: the tokens of a text file, or, of a kv-dump (.h5), of each of its sequences."""
    prompts: "list[Prompt]" = []
    encode: Any = None
    for path in paths:
        if path.suffix == ".h5":
            found = dumped_prompts(path)
        else:
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as e:
                raise CaptureError(f"{path}: cannot be read as text: {e}") from e
            encode = encode or load_tokenizer(tokenizer)
            found = [(path.stem, "text", encode(text)["input_ids"])]
        for name, kind, tokens in found:
            if not 1 <= len(os.fsencode(name)) <= 100 or name == "." or any(c == "/" or c < " " or c == "\x7f" for c in name):
                raise CaptureError(f"{path}: {name[:100]!r} cannot name a sequence: 1 to 100 bytes, not '.', no '/' or control characters")
            tokens = np.asarray(tokens)[:limit]
            if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < 2**31:
                raise CaptureError(f"{path}: {name}: a token's number is not in 0 to 2^31 - 1")
            prompts.append(Prompt(name, kind, tokens.astype(np.int32)))
    names = [p.id for p in prompts]
    if len(set(names)) != len(names):
        raise CaptureError(f"two prompts have one name: {', '.join(names)}")
    return prompts


class ProgressLine:
    """A line on stderr while it is a terminal."""

    def __init__(self, prompts: "list[Prompt]", layers: int) -> None:
        self.order = [p.id for p in prompts]
        self.layers = layers
        self.active = sys.stderr.isatty()

    def __call__(self, prompt: Prompt, layer: int) -> None:
        if self.active:
            place = f"{self.order.index(prompt.id) + 1}/{len(self.order)}"
            sys.stderr.write(f"\r\x1b[K{place} {prompt.id}: {prompt.tokens.size} tokens, layer {layer} of {self.layers}")
            sys.stderr.flush()

    def finish(self) -> None:
        if self.active:
            sys.stderr.write("\r\x1b[K")


def parse_arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Dump the KV cache of a Hugging Face causal language model (kv-dump v1, HDF5).")
    p.add_argument("--model", required=True, help="name or folder")
    p.add_argument("--prompt", required=True, action="append", type=pathlib.Path, metavar="FILE",
                   help="text file, or kv-dump whose tokens are taken; repeat for more sequences")
    p.add_argument("--out", required=True, type=pathlib.Path, help="kv-dump to write")
    p.add_argument("--force", action="store_true", help="replace an output that exists")
    p.add_argument("--tokenizer", help="name or folder (default: the model's)")
    p.add_argument("--dtype", default="auto", choices=["auto", "float16", "bfloat16", "float32"],
                   help="of the model, and so of the dump (default: as stored)")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--queries", type=int, default=128, metavar="N", help="newest queries to keep per layer; -1: all (default: 128)")
    p.add_argument("--max-tokens", type=int, metavar="N", help="cut prompts after N tokens")
    p.add_argument("--model-id", help="name in the dump, which a profile must share (default: the last part of --model)")
    p.add_argument("--gzip", type=int, default=1, choices=range(10), metavar="0-9", help="compression of the dump (default: 1)")
    return p.parse_args()


def refuse_bad(arguments: argparse.Namespace) -> None:
    if arguments.max_tokens is not None and arguments.max_tokens < 1:
        raise CaptureError("--max-tokens: must be positive")
    if arguments.queries < -1:
        raise CaptureError("--queries: must not be below -1")
    out = arguments.out
    for path in arguments.prompt:
        if path.resolve() == out.resolve() or (out.exists() and path.exists() and out.samefile(path)):
            raise CaptureError(f"--out {arguments.out}: would replace the prompt {path}")


def main() -> int:
    arguments = parse_arguments()
    try:
        refuse_bad(arguments)
        if arguments.out.exists() and not arguments.force:
            raise CaptureError(f"{arguments.out}: exists already; --force replaces it")
        prompts = read_prompts(arguments.prompt, arguments.tokenizer or arguments.model, arguments.max_tokens)
        model = load_model(arguments.model, arguments.dtype, arguments.device)
        line = ProgressLine(prompts, model.config.get_text_config().num_hidden_layers)
        dump = DumpFile(arguments.out, arguments.queries, arguments.gzip, arguments.force)
        unknown = capture(model, prompts, dump, arguments.model_id or pathlib.Path(arguments.model).resolve().name, line)
        line.finish()
        if unknown is not None:
            print(f"capture_hf: {arguments.out} does not tell how keys are rotated: {unknown}", file=sys.stderr)
    except (CaptureError, OSError, torch.cuda.OutOfMemoryError) as e:
        print(f"capture_hf: {e}", file=sys.stderr)
        return 3
    print(f"{arguments.out}: {len(prompts)} sequences, {dump.num_layers} layers, {sum(p.tokens.size for p in prompts)} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
