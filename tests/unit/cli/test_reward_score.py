"""`shoal reward score` and `check` against a server of a third party, and the command line of `serve`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner, Result

from shoal.cli.main import app
from shoal.cli.reward import offline
from shoal.cli.reward.serve import ServeOptions, serve_argv
from shoal.errors import ConfigError, DataError, NotFoundError, ShoalError, UnavailableError
from shoal.rpc.v1 import common_pb2, reward_pb2
from tests.helpers.fake_rest import fake_rest
from tests.helpers.third_party_reward import Context, ThirdPartyReward, served_in_thread

ROWS = [
    {"prompt": "2+2", "response": "4", "answer": "4"},
    {"prompt": "2+2", "response": "5", "answer": "4"},
    {"response": "[red]no answer"},
    {"response": "skip", "answer": "4"},
    {"response": "parts", "answer": "4"},
]


class Theirs(ThirdPartyReward):
    """Scores equality, declines `skip`, gives `parts` in parts; fails the call for `break`."""

    async def Score(self, request: reward_pb2.ScoreRequest, context: Context) -> reward_pb2.ScoreResponse:
        if any(sample.response == "break" for sample in request.samples):
            await context.abort(grpc.StatusCode.INTERNAL, "broken")
        return await super().Score(request, context)

    def result(self, sample: reward_pb2.ScoreSample, index: int, request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResult:
        if sample.response == "skip":
            return reward_pb2.ScoreResult(sample_id=sample.sample_id, status=common_pb2.SCORE_STATUS_NOT_SCORED, value=7.0)
        if sample.response == "parts":
            parts = {"style": 0.25, "truth": 0.5}
            return reward_pb2.ScoreResult(sample_id=sample.sample_id, status=common_pb2.SCORE_STATUS_SCORED, value=0.75, components=parts)
        return super().result(sample, index, request)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served_in_thread(Theirs()) as where:
        yield where


def written(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["reward", *arguments])


def failed(*arguments: str) -> ShoalError:
    result = invoke(*arguments)
    assert isinstance(result.exception, ShoalError), result.output
    return result.exception


def test_score_prints_each_row_and_a_summary(address: str, tmp_path: Path) -> None:
    path = written(tmp_path, *ROWS)
    result = invoke("score", "equals", "--data", str(path), "--address", address)
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        f"{path}:1: scored  1",
        f"{path}:2: scored  0",
        f"{path}:3: error: no answer in the row",
        f"{path}:4: not scored",
        f"{path}:5: scored  0.75  style=0.25  truth=0.5",
        "equals@2: 5 rows: 3 scored, 1 not scored, 1 error; mean 0.583333, standard deviation 0.424918",
    ]


def test_score_succeeds_if_nothing_is_wrong(address: str, tmp_path: Path) -> None:
    result = invoke("score", "equals@1", "--data", str(written(tmp_path, *ROWS[:2], ROWS[3])), "--address", address)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "equals@1: 3 rows: 2 scored, 1 not scored, 0 error; mean 0.5, standard deviation 0.5"


def test_score_names_bad_lines_and_scores_the_others(address: str, tmp_path: Path) -> None:
    path = written(tmp_path, ROWS[0], "nonsense", ROWS[1])
    result = invoke("score", "equals", "--data", str(path), "--address", address)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[1].startswith(f"{path}:2: bad line: not JSON")
    assert lines[-1] == "equals@2: 2 rows: 2 scored, 0 not scored, 0 error, 1 bad lines; mean 0.5, standard deviation 0.5"


def test_score_gives_json_and_a_file_without_a_value_where_there_is_no_score(address: str, tmp_path: Path) -> None:
    out = tmp_path / "scores.jsonl"
    path = written(tmp_path, *ROWS[2:], "nonsense")
    result = invoke("score", "equals", "--data", str(path), "--address", address, "--json", "--out", str(out))
    document = json.loads(result.stdout)
    assert document["rows"] == [json.loads(line) for line in out.read_text().splitlines()]
    shown = [(row["line"], row["status"], row["value"]) for row in document["rows"]]
    assert shown == [(1, "error", None), (2, "not_scored", None), (3, "scored", 0.75), (4, "bad_line", None)]
    assert document["rows"][2]["components"] == {"style": 0.25, "truth": 0.5}
    counts = {"num_rows": 3, "num_scored": 1, "num_not_scored": 1, "num_errors": 1, "num_bad_lines": 1}
    assert document["summary"] == counts | {"mean": 0.75, "std": 0.0}
    assert (document["scorer"], document["version"]) == ("equals", "2")


def test_score_keeps_the_order_over_batches_and_a_failing_call_costs_its_batch_only(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "BATCH_ROWS", 2)
    rows: list[Any] = [{"response": str(i), "answer": "1"} for i in range(21)]
    rows[5]["response"] = "break"
    result = invoke("score", "equals", "--data", str(written(tmp_path, *rows)), "--address", address, "--json")
    found = json.loads(result.stdout)["rows"]
    assert [row["line"] for row in found] == list(range(1, 22))
    assert [row["line"] for row in found if row["status"] == "error"] == [5, 6]
    assert "broken" in found[5]["message"]


def test_score_of_an_empty_file_has_no_mean(address: str, tmp_path: Path) -> None:
    result = invoke("score", "equals", "--data", str(written(tmp_path)), "--address", address, "--json")
    assert json.loads(result.stdout)["summary"]["mean"] is None


def test_score_says_which_scorers_there_are(address: str, tmp_path: Path) -> None:
    path = str(written(tmp_path, *ROWS))
    problem = failed("score", "equal", "--data", path, "--address", address)
    assert isinstance(problem, NotFoundError)
    assert str(problem) == "no scorer 'equal'; did you mean equals? there is: equals@1, equals@2"
    assert "no scorer 'equals' version '3'; there is" in str(failed("score", "equals@3", "--data", path, "--address", address))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["score", "equals", "--data", "missing.jsonl"], "--data missing.jsonl does not exist"),
        (["score", "equals@", "--data", "missing.jsonl"], "scorer 'equals@' is not NAME[@VERSION]"),
        (
            ["score", "a", "--data", "x", "--address", "h:1", "--module", "m"],
            "--module and --serve belong to a server of this command's own",
        ),
        (["score", "a", "--data", "x", "--ca-file", "ca.pem"], "belong to --address"),
        (["score", "a", "--data", "{rows}", "--serve", "none.yaml"], "--serve none.yaml does not exist"),
        (["score", "a", "--data", "{rows}", "--address", "nonsense"], "address 'nonsense' is not host:port"),
        (["score", "a", "--data", "{rows}", "--address", "{address}", "--out", "/none/x"], "--out /none/x cannot be written"),
        (["check", "nonsense"], "address 'nonsense' is not host:port"),
        (["check", "h:1", "--data", "missing.jsonl"], "--data missing.jsonl does not exist"),
        (["check", "h:1", "--data", "{bad}"], "has no row to score in its first 16 lines"),
        (["check", "h:1", "--ca-file", "/none.pem"], "security.ca_file: cannot read /none.pem"),
    ],
)
def test_what_cannot_be_used_is_one_message(address: str, tmp_path: Path, arguments: list[str], words: str) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("nonsense\n")
    names = {"{rows}": str(written(tmp_path, *ROWS)), "{bad}": str(bad), "{address}": address}
    problem = failed(*(names.get(text, text) for text in arguments))
    assert isinstance(problem, ConfigError | DataError)
    assert words in str(problem)


def test_score_says_that_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "DESCRIBE_TIMEOUT_S", 0.2)
    problem = failed("score", "a", "--data", str(written(tmp_path, *ROWS)), "--address", "127.0.0.1:1")
    assert isinstance(problem, UnavailableError)
    assert "127.0.0.1:1" in str(problem)


def test_check_shows_each_check_and_passes_a_right_server() -> None:
    with served_in_thread(ThirdPartyReward()) as where:
        result = invoke("check", where, "--scorer", "equals@2")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"server at {where}"
    assert lines[1].split() == ["ok", "describes", "itself", "2", "scorers", "in", lines[1].split()[6], "ms"]
    assert "equals@2" in lines
    assert lines[-1] == "fit for use: 19 ok, 0 warnings, 0 failed"


def test_check_says_what_failed_and_what_to_do() -> None:
    class Forgetful(ThirdPartyReward):
        fingerprint = ""

        async def Score(self, request: reward_pb2.ScoreRequest, context: Context) -> reward_pb2.ScoreResponse:
            if not request.samples:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "nothing\nto score")
            return await super().Score(request, context)

    with served_in_thread(Forgetful()) as where:
        result = invoke("check", where, "--scorer", "equals@2")
        document = json.loads(invoke("check", where, "--scorer", "equals@2", "--json").stdout)
    assert result.exit_code == 1
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert f"FAILED empty batch the call failed (InvalidRequest): reward at {where}: nothing to score" in lines
    assert any(line.startswith("to do: answer an empty batch with") for line in lines)
    assert "warning fingerprints none for equals@1, equals@2" in lines
    assert lines[-1] == "not fit for use: 17 ok, 1 warnings, 1 failed"
    assert document["passed"] is False
    (failure,) = (check for check in document["checks"] if check["level"] == "failure")
    assert (failure["name"], failure["scorer"]) == ("empty batch", "equals@2")
    assert [scorer["name"] for scorer in document["scorers"]] == ["equals", "equals"]


def test_check_tries_the_rows_that_are_given(address: str, tmp_path: Path) -> None:
    path = written(tmp_path, "nonsense", {"response": "skip"}, {"response": "skip"})
    result = invoke("check", address, "--data", str(path))
    assert result.exit_code == 0, result.stdout
    assert "warning a sample is scored 2 not scored" in " ".join(result.stdout.split())
    assert f"{path}:1: not JSON" in result.stderr


def argv_of(**changes: Any) -> list[str]:  # noqa: ANN401 - any option
    fields: dict[str, Any] = {"file": None, "modules": (), "run": None, "coordinator": None, "service_id": "reward-1", "more": ()}
    return serve_argv(ServeOptions(**(fields | changes)))


def test_serve_passes_everything_on(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("scorers: {}\n")
    argv = argv_of(file=file, modules=("a", "b.py"), coordinator="h:1", more=["--host", "0.0.0.0"])  # noqa: S104 - text
    expected = ["--service-id", "reward-1", "--serve", str(file), "--module", "a", "--module", "b.py", "--coordinator", "h:1"]
    assert argv == [sys.executable, "-m", "shoal_reward", *expected, "--host", "0.0.0.0"]  # noqa: S104 - text


@pytest.mark.parametrize(("grpc_address", "coordinator"), [("10.0.0.3:7000", "10.0.0.3:7000"), ("0.0.0.0:7000", "127.0.0.1:7000")])
def test_serve_asks_a_run_where_to_register(grpc_address: str, coordinator: str) -> None:
    with fake_rest({"GET /v1/status": {"grpc_address": grpc_address}}) as rest:
        argv = argv_of(modules=("a",), run=rest.address)
    assert argv[argv.index("--coordinator") + 1] == coordinator


def test_serve_refuses_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml does not exist"):
        argv_of(file=Path("none.yaml"))
    with pytest.raises(ConfigError, match="name the same thing"):
        argv_of(run="h:1", coordinator="h:2")
    with fake_rest({"GET /v1/status": {"grpc_address": None}}) as rest, pytest.raises(UnavailableError, match="tells no gRPC address"):
        argv_of(run=rest.address)
