# SPDX-License-Identifier: Apache-2.0
"""The command of calibration: options, progress, exit codes; of any model that it is given."""
from __future__ import annotations

import argparse
import pathlib
import sys
import time
from typing import Callable, List, Optional, Sequence

from ._calibration import CalibrationError, CalibrationModel, Plan, calibrate, make_prompts
from .errors import TierkvError
from .profile import ProfileData, write_profile

EXIT_BAD_INPUT = 3

MakeModel = Callable[[argparse.Namespace], CalibrationModel]


def options(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, metavar="FOLDER", help="model and tokenizer in Hugging Face layout")
    parser.add_argument("--model-id", metavar="NAME", help="the model's name in the profile (default: the folder's name)")
    parser.add_argument("--text", required=True, nargs="+", type=pathlib.Path, metavar="FILE", help="plain texts, UTF-8, for prompts")
    parser.add_argument("-o", "--output", required=True, type=pathlib.Path, metavar="FILE", help="the profile to write (HDF5)")
    parser.add_argument("--force", action="store_true", help="replace an output that exists")
    parser.add_argument("--prompts", type=int, default=4, help="prompts at most, from all texts in turn (default 4)")
    parser.add_argument("--prompt-tokens", type=int, default=Plan.prompt_tokens, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--suffix-tokens", type=int, default=Plan.suffix_tokens,
                        help="tokens that follow a prompt, whose predictions are compared (default %(default)s)")
    parser.add_argument("--resume", type=pathlib.Path, metavar="FILE",
                        help="what was measured so far, written after each layer (default: OUTPUT.resume.npz)")
    return parser


class ProgressLine:
    """Prompt, layer and seconds on stderr: one line on a terminal, else a line per prompt."""

    def __init__(self, prompts: int, layers: int) -> None:
        self.prompts, self.layers, self.begin = prompts, layers, time.monotonic()

    def __call__(self, prompt: int, layer: int) -> None:
        last, terminal = layer + 1 == self.layers, sys.stderr.isatty()
        if last or terminal:
            text = f"calibrate: prompt {prompt + 1}/{self.prompts}, layer {layer + 1}/{self.layers}, {time.monotonic() - self.begin:.0f} s"
            print(text, file=sys.stderr, end="\r" if terminal and not (last and prompt + 1 == self.prompts) else "\n", flush=True)


def summary(profile: ProfileData) -> str:
    lines = [f"{profile.model_id}: {profile.num_layers} layers, {profile.num_kv_heads} kv heads, head_dim {profile.head_dim}"]
    for name in ("key", "value", "joint"):
        kl = getattr(profile, f"{name}_sensitivity")
        middle = float(sorted(kl.ravel())[kl.size // 2])
        lines.append(f"{name} sensitivity: KL {kl.min():.2g} to {kl.max():.2g}, median {middle:.2g}, largest / median {kl.max() / middle:.0f}")
    return "\n".join(lines)


def run(args: argparse.Namespace, make_model: MakeModel) -> None:
    if args.output.exists() and not args.force:
        raise CalibrationError(f"{args.output}: exists; give --force to replace it")
    if not args.output.parent.is_dir():
        raise CalibrationError(f"{args.output}: its folder does not exist")
    if args.prompts < 1:
        raise CalibrationError("--prompts: must be positive")
    plan = Plan(prompt_tokens=args.prompt_tokens, suffix_tokens=args.suffix_tokens)
    plan.validate()
    texts = []
    for path in args.text:
        try:
            texts.append((str(path), path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError) as e:
            raise CalibrationError(f"{path}: cannot be read as text: {e}") from e
    if args.model_id is None:
        args.model_id = pathlib.Path(args.model).resolve().name
    model = make_model(args)
    prompts = make_prompts(model, texts, plan, args.prompts)
    resume = args.resume or args.output.with_name(args.output.name + ".resume.npz")
    profile, kept = calibrate(model, prompts, plan, resume, ProgressLine(len(prompts), model.facts().num_layers))
    write_profile(args.output, profile)
    kept.remove()
    print(summary(profile))


def main(args: argparse.Namespace, make_model: MakeModel) -> int:
    try:
        run(args, make_model)
    except (CalibrationError, TierkvError, OSError) as e:
        print(f"tierkv: error: {e}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0
