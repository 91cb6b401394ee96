# SPDX-License-Identifier: Apache-2.0
"""A profile of a Hugging Face model: python -m tierkv.calibrate_model --model FOLDER --text FILE... -o profile.h5

Statistics of keys, values and queries, and how far the model's predictions move when one head alone is coarse, each head in turn.
Needs PyTorch and transformers; all is computed in float32. What was measured is kept after each layer, so that a run that was cut
off goes on where it stopped.
"""
from __future__ import annotations

import argparse
import sys
from typing import Optional, Sequence

from . import _calibration_command as command
from ._calibration import CalibrationError, CalibrationModel


def make_model(args: argparse.Namespace) -> CalibrationModel:
    if args.batch < 1:
        raise CalibrationError("--batch: must be positive")
    try:
        from ._calibration_torch import TorchModel
    except ImportError as e:
        raise CalibrationError(f"{e.name} is missing: run pip install '.[calibrate]' in tierkv's checkout") from e
    return TorchModel(args.model, args.model_id, args.device, args.batch)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = command.options((__doc__ or "").split("\n")[0])
    parser.prog = "python -m tierkv.calibrate_model"
    parser.add_argument("--device", help="of PyTorch (default: cuda where there is one, else cpu)")
    parser.add_argument("--batch", type=int, default=16, help="sequences at a time; halved where the GPU's memory is too small (default 16)")
    return command.main(parser.parse_args(arguments), make_model)


if __name__ == "__main__":
    sys.exit(main())
