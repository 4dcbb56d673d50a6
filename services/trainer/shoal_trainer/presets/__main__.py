"""Command line of the presets: python -m shoal_trainer.presets NAME --out DIR --seed S."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from shoal.errors import ShoalError
from shoal.process import die_with_parent
from shoal_trainer.presets import PRESET_NAMES, PRESET_VERSION
from shoal_trainer.presets.files import read_complete

_log = logging.getLogger("shoal_trainer.presets")


def main(argv: list[str] | None = None) -> int:
    """Build a preset unless the folder already has it; progress goes to stderr. Returns the exit status."""
    die_with_parent()
    arguments = _parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if read_complete(arguments.out, name=arguments.name, seed=arguments.seed) is not None:
        _log.info("%s is complete, nothing to do", arguments.out)
        return 0
    try:
        _build(arguments)
    except (ShoalError, OSError) as error:
        _log.error("cannot build preset %s: %s", arguments.name, error)
        return 1
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shoal_trainer.presets", description="Prepare a policy and data for `shoal demo`.")
    parser.add_argument("name", choices=PRESET_NAMES)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; created if missing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; part of what makes weights repeatable")
    parser.add_argument("--version", action="version", version=str(PRESET_VERSION))
    return parser.parse_args(argv)


def _build(arguments: argparse.Namespace) -> None:
    # torch reads this once, at import.
    os.environ.setdefault("OMP_NUM_THREADS", str(arguments.threads))
    import torch

    torch.set_num_threads(arguments.threads)
    if arguments.name == "arithmetic":
        from shoal_trainer.presets.arithmetic import build_arithmetic

        build_arithmetic(arguments.out, arguments.seed)
    else:
        from shoal_trainer.presets.smollm2 import build_smollm2

        build_smollm2(arguments.out, arguments.seed)


if __name__ == "__main__":
    sys.exit(main())
