"""Entry point of the command `shoal`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shoal.cli.addresses import DEFAULT_ADDRESS
from shoal.cli.reward.app import reward_app
from shoal.errors import ShoalError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="RL post-training of language models as services."
)

weights_app = typer.Typer(no_args_is_help=True, help="The weights that rollout servers compute with.")
app.add_typer(weights_app, name="weights")
app.add_typer(reward_app, name="reward")

RestAddress = Annotated[str, typer.Option(help="the coordinator's REST address")]

_EXIT_INTERRUPTED = 130


@app.command()
def demo(
    preset: Annotated[str, typer.Option(help="arithmetic (tiny, minutes on two cores) or smollm2 (135 M parameters)")] = "arithmetic",
    seed: Annotated[int, typer.Option(help="seed of model, data, sampling")] = 0,
    steps: Annotated[int | None, typer.Option(help="training steps; the preset's own number if not given")] = None,
    redis: Annotated[str | None, typer.Option(help="redis:// address of your own server; an embedded one otherwise")] = None,
    actor_ranks: Annotated[int | None, typer.Option(help="processes of the actor gang")] = None,
    model: Annotated[str | None, typer.Option(help="your model: Hugging Face folder or id (with --data and --reward)")] = None,
    data: Annotated[
        str | None, typer.Option(help="your training rows with a prompt column: JSONL, Parquet, or a data set's folder")
    ] = None,
    held_out: Annotated[str | None, typer.Option(help="your evaluation rows, in the same formats")] = None,
    reward: Annotated[str | None, typer.Option(help="name of the scorer")] = None,
    runs: Annotated[Path, typer.Option(help="folder of run folders")] = Path("runs"),
    overrides: Annotated[list[str] | None, typer.Option("--set", help="a.b=value, overrides the configuration")] = None,
) -> None:
    """Train a model with PPO through real services on this machine."""
    from shoal.cli.demo import DemoOptions, run_demo

    options = DemoOptions(
        preset=preset,
        seed=seed,
        runs_folder=runs,
        steps=steps,
        redis_url=redis,
        actor_ranks=actor_ranks,
        model=model,
        data=data,
        held_out=held_out,
        reward=reward,
        overrides=tuple(overrides or ()),
    )
    try:
        raise typer.Exit(run_demo(options, Console()))
    except KeyboardInterrupt:
        Console(stderr=True).print("shoal: interrupted; every service was stopped", highlight=False)
        raise typer.Exit(_EXIT_INTERRUPTED) from None


@app.command()
def status(address: RestAddress = DEFAULT_ADDRESS) -> None:
    """Show what a run is doing."""
    from shoal.cli.status import show_status

    show_status(address, Console())


@app.command()
def pause(address: RestAddress = DEFAULT_ADDRESS) -> None:
    """Pause a run before its next step."""
    from shoal.cli.control import send_command

    send_command(address, "pause", Console())


@app.command()
def resume(address: RestAddress = DEFAULT_ADDRESS) -> None:
    """Go on after a pause, and after an alert of the reward."""
    from shoal.cli.control import send_command

    send_command(address, "resume", Console())


@app.command()
def stop(address: RestAddress = DEFAULT_ADDRESS) -> None:
    """End a run after its current step."""
    from shoal.cli.control import send_command

    send_command(address, "stop", Console())


@app.command()
def plan(
    model: Annotated[
        Path | None, typer.Option(help="folder of a Hugging Face model, or its config.json (Llama, Mistral, Qwen2, Qwen3)")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="shape of a known model instead, such as llama-70b")] = None,
    ranks: Annotated[int, typer.Option(help="processes of the trainer")] = 8,
    trainer_tp: Annotated[int, typer.Option(help="tensor parallelism of the trainer, within its ranks")] = 1,
    replicas: Annotated[int, typer.Option(help="copies of the sharded trainer (hybrid sharding), within its ranks")] = 1,
    engines: Annotated[int, typer.Option(help="rollout servers")] = 1,
    tp: Annotated[int, typer.Option(help="tensor parallelism of each engine")] = 1,
    dtype: Annotated[str, typer.Option(help="serving dtype")] = "bfloat16",
    bucket_bytes: Annotated[int, typer.Option(help="push.bucket_bytes", min=4096)] = 16 << 20,
    transport: Annotated[str, typer.Option(help="push.transport: auto, shm, grpc, collective or cuda_ipc")] = "auto",
    device: Annotated[str, typer.Option(help="where both sides hold weights: cuda or cpu")] = "cuda",
    same_host: Annotated[bool, typer.Option("--same-host", help="engines run on the trainer's machine")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document")] = False,
) -> None:
    """Say what a weight push would send over which link, without running anything."""
    from shoal.cli.plan import show_plan
    from shoal.cli.plan_report import PlanOptions
    from shoal.cli.plan_shapes import choose_shape

    options = PlanOptions(
        shape=choose_shape(model, shape),
        num_ranks=ranks,
        trainer_tp=trainer_tp,
        replicas=replicas,
        num_engines=engines,
        tp=tp,
        dtype=dtype,
        bucket_bytes=bucket_bytes,
        transport=transport,
        device=device,
        same_host=same_host,
    )
    show_plan(options, Console(), as_json=as_json)


@weights_app.command()
def verify(
    address: RestAddress = DEFAULT_ADDRESS,
    timeout_s: Annotated[float, typer.Option(min=1, max=3600, help="seconds to wait until the weights are free and compared")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="print the API's answer")] = False,
) -> None:
    """Compare every server's live weights with the trainer's; exit code 1 if one differs."""
    from shoal.cli.weights import verify_weights

    raise typer.Exit(verify_weights(address, timeout_s, Console(), as_json=as_json))


@app.command("check-cases")
def check_cases_command(file: Annotated[Path, typer.Argument(help="numeric cases, schema math-cases/1")]) -> None:
    """Run numeric cases through the functions that training calls; exit code 1 if one fails, 2 if the file cannot be used."""
    from shoal.cli.check_cases import check_cases

    raise typer.Exit(check_cases(file, Console(), Console(stderr=True)))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context, name: Annotated[str, typer.Argument(help="step, push or reward")]) -> None:
    """Measure: shoal bench step --size micro --samples 64 --max-new-tokens 64 --json (each has its own --help)."""
    from shoal.cli.bench import run_benchmark

    raise typer.Exit(run_benchmark(name, context.args))


def main() -> None:
    """Run the command; an error becomes one line and exit code 1."""
    try:
        app()
    except ShoalError as error:
        Console(stderr=True).print(f"shoal: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
