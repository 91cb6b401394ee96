#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prompts and what comes behind them, in a file that quality is measured with on another machine: texts that go on, and lookups.

    python3 bench/answers/items.py --model FOLDER --out FILE [--tokens 2048 7936] [--texts 4] [--lookups 4] [--seed 1]

Needs no GPU. The texts are files of Debian 12."""
import argparse
import dataclasses
import json
import pathlib
import types

from model import Tokenizer
from quality import TEXTS, make_items
from tasks import Item


def read_items(path):
    return [Item(**item) for item in json.loads(pathlib.Path(path).read_text())]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, type=pathlib.Path)
    p.add_argument("--out", required=True, type=pathlib.Path)
    p.add_argument("--tokens", nargs="+", type=int, default=[2048])
    p.add_argument("--texts", type=int, default=4)
    p.add_argument("--lookups", type=int, default=4)
    p.add_argument("--seed", default="1")
    a = p.parse_args()
    spec, options = (json.loads((a.model / name).read_text()) for name in ("config.json", "tokenizer_config.json"))
    reader = types.SimpleNamespace(tokenizer=Tokenizer(a.model / "tokenizer.json"),
                                   opening=[spec["bos_token_id"]] if options.get("add_bos_token", True) else [])
    texts = [pathlib.Path(t).read_text(errors="replace") for t in TEXTS]
    items = [item for tokens in a.tokens for item in make_items(reader, texts, a.seed, tokens, (a.texts, a.lookups))]
    a.out.write_text(json.dumps([dataclasses.asdict(item) for item in items]))


if __name__ == "__main__":
    main()
