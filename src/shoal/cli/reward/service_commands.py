"""The commands about reward services: check one, run one, score through one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from shoal.config.models import SecuritySection

service_app = typer.Typer(no_args_is_help=True)

Modules = Annotated[list[str] | None, typer.Option("--module", help="module or .py file with @reward functions; may be repeated")]
CaFile = Annotated[str | None, typer.Option(help="PEM of the CA, for mTLS; plaintext without")]
CertFile = Annotated[str | None, typer.Option(help="PEM certificate of this client")]
KeyFile = Annotated[str | None, typer.Option(help="PEM key of this client")]

_EXIT_INTERRUPTED = 130


def _security(ca_file: str | None, cert_file: str | None, key_file: str | None) -> SecuritySection:
    from shoal.config.models import SecuritySection

    is_plain = ca_file is None and cert_file is None and key_file is None
    return SecuritySection(insecure=is_plain, ca_file=ca_file, cert_file=cert_file, key_file=key_file)


@service_app.command()
def check(
    server: Annotated[str, typer.Argument(metavar="HOST:PORT", help="where the reward service listens (gRPC)")],
    scorer: Annotated[list[str] | None, typer.Option(help="NAME[@VERSION]; all if not given; may be repeated")] = None,
    data: Annotated[Path | None, typer.Option(help="JSONL with response, answer and prompt to try it on")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, max=3600, help="deadline of each call, in seconds")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document")] = False,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
) -> None:
    """Say what is wrong with a reward service, whoever wrote it; exit code 1 if something is."""
    from shoal.cli.reward.check import CheckOptions, check_server

    options = CheckOptions(
        address=server,
        scorers=scorer or (),
        data=data,
        timeout_s=timeout_s,
        security=_security(ca_file, cert_file, key_file),
        as_json=as_json,
    )
    raise typer.Exit(check_server(options, Console(), Console(stderr=True)))


@service_app.command()
def score(
    scorer: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="scorer; the newest version if none is given")],
    data: Annotated[Path, typer.Option(help="JSONL with response, answer, prompt and other columns")],
    module: Modules = None,
    serve: Annotated[Path | None, typer.Option(help="YAML file of a reward service: scorers with settings")] = None,
    address: Annotated[str | None, typer.Option(help="HOST:PORT of a running reward service instead of an own one")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, max=3600, help="deadline of a batch of 64 rows, in seconds")] = 120.0,
    out: Annotated[Path | None, typer.Option(help="also write one JSON object per row into this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document")] = False,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
) -> None:
    """Score rows without a training, by the same service; exit code 1 if a line was no row or a row an error."""
    from shoal.cli.reward.score import ScoreOptions, score_file

    options = ScoreOptions(
        scorer=scorer,
        data=data,
        modules=module or (),
        serve=serve,
        address=address,
        security=_security(ca_file, cert_file, key_file),
        timeout_s=timeout_s,
        out=out,
        as_json=as_json,
    )
    try:
        raise typer.Exit(score_file(options, Console(), Console(stderr=True)))
    except KeyboardInterrupt:
        Console(stderr=True).print("shoal: interrupted", highlight=False)
        raise typer.Exit(_EXIT_INTERRUPTED) from None


@service_app.command()
def serve(
    service_id: Annotated[str, typer.Option(help="name in the registry, unique in the run, such as reward-1")],
    file: Annotated[Path | None, typer.Argument(metavar="[FILE.yaml]", help="scorers with settings, number and limits of graders")] = None,
    module: Modules = None,
    run: Annotated[str | None, typer.Option(help="REST address of the coordinator to register with")] = None,
    coordinator: Annotated[str | None, typer.Option(help="or HOST:PORT of its gRPC; without either it registers nowhere")] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0 picks a free one")] = 0,
    advertise: Annotated[str | None, typer.Option(help="host name that others reach this service by; --host if not given")] = None,
    ca_file: CaFile = None,
    cert_file: Annotated[str | None, typer.Option(help="PEM certificate of this service")] = None,
    key_file: Annotated[str | None, typer.Option(help="PEM key of this service")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="plaintext beyond this machine too, in a private network")] = False,
    metrics_port: Annotated[int | None, typer.Option(min=-1, max=65535, help="Prometheus port; 0 picks a free one, -1 is none")] = None,
) -> None:
    """Run a reward service until SIGTERM or Ctrl-C."""
    from shoal.cli.reward.serve import ServeOptions
    from shoal.cli.reward.serve import serve as become_service

    chosen = {
        "--advertise": advertise,
        "--ca-file": ca_file,
        "--cert-file": cert_file,
        "--key-file": key_file,
        "--metrics-port": None if metrics_port is None else str(metrics_port),
    }
    more = ["--host", host, "--port", str(port), *(["--insecure"] if insecure else [])]
    more += [text for option, value in chosen.items() if value is not None for text in (option, value)]
    become_service(ServeOptions(file=file, modules=module or (), run=run, coordinator=coordinator, service_id=service_id, more=more))
