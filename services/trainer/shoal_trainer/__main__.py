r"""One rank of a trainer gang; started by torchrun:

    python -m torch.distributed.run --standalone --nproc-per-node N -m shoal_trainer \
        --role actor --config F --service-id actor --coordinator HOST:PORT
"""

from __future__ import annotations

import argparse
import os
import sys

from shoal.process import SUPERVISED_VARIABLE, die_with_parent


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="shoal_trainer", description="One rank of a trainer gang.")
    parser.add_argument("--role", choices=("actor", "critic"), required=True, help="what the gang trains")
    parser.add_argument("--config", required=True, help="the run's YAML file")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--service-id", required=True, help="name in the registry")
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT", help="address of the registry")
    parser.add_argument("--host", default="127.0.0.1", help="address that rank 0 listens on")
    parser.add_argument("--port", type=int, default=0, help="port that rank 0 listens on; 0 picks a free one")
    parser.add_argument("--advertise", default=None, metavar="HOST", help="host that others dial; default --host")
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
