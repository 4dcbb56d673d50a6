r"""One rank of a trainer gang; started by torchrun:

    python -m torch.distributed.run --standalone --nproc-per-node N -m shoal_trainer \
        --role actor --config F --service-id actor --coordinator HOST:PORT
"""

from __future__ import annotations

import argparse
import os
import sys

from shoal.process import SUPERVISED_VARIABLE, die_with_parent
from shoal.service_arguments import add_service_arguments


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="shoal_trainer", description="One rank of a trainer gang.")
    parser.add_argument("--role", choices=("actor", "critic"), required=True, help="what the gang trains")
    add_service_arguments(parser, example="actor")
    return parser.parse_args(arguments)


def main() -> None:
    """Tie this process to torchrun, then load everything else: a rank must not outlive a killed torchrun even while it imports torch."""
    os.environ.setdefault(SUPERVISED_VARIABLE, "1")
    die_with_parent()
    # A waiting store logs each bounded wait as a warning otherwise; it has to be set before torch is loaded.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    arguments = parse_arguments()
    from shoal_trainer.rank import run_rank

    # The computing thread may be inside a collective that never ends: nothing waits for it.
    status = run_rank(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
