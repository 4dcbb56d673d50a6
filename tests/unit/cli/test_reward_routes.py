"""`shoal reward list | add | shadow | activate | rollback | retire | log | slow`, against a page that answers like a coordinator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from shoal_coordinator.rest_reward_models import (
    ActivateBody,
    AddBody,
    LogModel,
    ReasonBody,
    RewardsModel,
    RouteModel,
    ShadowBody,
    SlowSamplesModel,
)
from typer.testing import CliRunner, Result

from shoal.cli.main import app
from shoal.cli.reward import routes
from shoal.cli.reward.api import login_name
from shoal.errors import ConfigError, DeadlineError, InvalidRequestError, NotFoundError, ShoalError, StateError, UnavailableError
from tests.helpers.fake_rest import Answer, FakeRest, error, fake_rest


def component(scorer: str = "math", **changes: Any) -> Answer:  # noqa: ANN401 - any field
    parts: Answer = {"version": "2", "fingerprint": "f", "weight": 1.0, "parts": {}, "timeout_s": 30.0, "is_required": True, "sources": []}
    return {"scorer": scorer, **parts, **changes}


def route(number: int = 2, stage: str = "ready", **changes: Any) -> Answer:  # noqa: ANN401 - any field
    fields: Answer = {
        "label": "mix",
        "components": [component()],
        "created_unix_s": 1.0,
        "stage_since_unix_s": 2.0,
        "num_open_groups": 3,
        "problem": None,
        "shadow_share": None,
        "gates": None,
        "gate_problems": [],
    }
    # Through the coordinator's own model: the answers of these tests are its answers.
    return RouteModel.model_validate({"number": number, "stage": stage, **fields, **changes}).model_dump(mode="json")


def rewards(*revisions: Answer, scorers: tuple[str, ...] = ("math", "length"), problem: str | None = None) -> Answer:
    offered = [{"name": name, "version": "2", "fingerprint": "f", "description": "[b]"} for name in scorers]
    server = {"service_id": "reward-0", "address": "h:1", "is_static": False, "state": "ready", "problem": problem, "scorers": offered}
    return RewardsModel.model_validate({"active": 1, "revisions": revisions, "servers": [server]}).model_dump(mode="json")


def invoke(rest: FakeRest, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["reward", *arguments, "--address", rest.address], env={"COLUMNS": "200"})


def run(answers: Mapping[str, Any], *arguments: str) -> tuple[Result, list[Answer]]:
    """The result of the command, and the bodies of its POSTs."""
    with fake_rest(answers) as rest:
        result = invoke(rest, *arguments)
    return result, [request.body for request in rest.requests if request.method == "POST"]


def failed(answers: Mapping[str, Any], *arguments: str) -> ShoalError:
    result, _ = run(answers, *arguments)
    assert isinstance(result.exception, ShoalError), result.output
    return result.exception


def test_list_shows_revisions_and_servers() -> None:
    parts = [component(weight=0.5), component("style", is_required=False, sources=["a", "b"], parts={"tone": 2.0})]
    gates = {"min_samples": 100, "min_rank_correlation": None, "max_p99_ms": None, "max_error_share": None}
    shadow = route(3, "shadow", components=parts, shadow_share=0.25, gates=gates, gate_problems=["min_samples: 7 samples"])
    listed = rewards(route(1, "active"), route(2, "rejected", problem="no scorer [red]x"), shadow, problem="silent since 3 s")
    result, _ = run({"GET /v1/rewards": listed}, "list")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["revision", "stage", "since", "label", "reward", "open", "groups"]
    assert lines[1].split()[:2] == ["1", "active"]
    assert "0.5 math@2 + style@2 (tone x2; for a, b; optional)" in lines[3]
    assert lines[4] == "revision 2: no scorer [red]x"
    assert lines[5] == "revision 3 scores 25% of the groups beside the active one; see shoal reward compare 3"
    assert lines[6] == "revision 3 becomes active when its gates pass (min_samples 100): min_samples: 7 samples"
    assert lines[8].split() == ["reward-0", "h:1", "ready", "math@2,", "length@2"]
    assert lines[9] == "reward-0: silent since 3 s"


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        (
            (512, 3, 1),
            "512 rows checked with their own answer, 3 without a score, 1 not correct; unscored_rows.jsonl in the run's folder has them",
        ),
        ((512, 0, 0), "512 rows checked with their own answer, 0 without a score, 0 not correct"),
    ],
)
def test_list_says_what_the_check_of_the_data_has_found(counts: tuple[int, int, int], line: str) -> None:
    rows = dict(zip(("num_checked", "num_unscored", "num_not_correct"), counts, strict=True))
    result, _ = run({"GET /v1/rewards": rewards(route()) | {"rows": rows}}, "list")
    assert result.stdout.splitlines()[-1] == f"data: {line}"


def test_list_prints_the_answer_as_json() -> None:
    listed = rewards(route())
    result, _ = run({"GET /v1/rewards": listed}, "list", "--json")
    assert json.loads(result.stdout) == listed


def test_add_sends_components_and_who_and_why() -> None:
    arguments: tuple[str, ...] = (
        "add",
        "math@2*0.5",
        "length*-0.1",
        "style",
        "--optional",
        "style",
        "--source",
        "gsm8k=math",
        "--source",
        "x=y=math",
    )
    arguments += ("--label", "mix", "--server", "h:1", "--timeout-s", "5", "--who", "ada", "--why", "longer answers")
    result, (body,) = run({"POST /v1/rewards/routes": route(stage="registered")}, *arguments)
    assert result.exit_code == 0, result.exception
    AddBody.model_validate(body)
    assert body == {
        "label": "mix",
        "addresses": ["h:1"],
        "who": "ada",
        "why": "longer answers",
        "components": [
            {"scorer": "math", "version": "2", "weight": 0.5, "timeout_s": 5.0, "sources": ["gsm8k", "x=y"]},
            {"scorer": "length", "weight": -0.1, "timeout_s": 5.0},
            {"scorer": "style", "timeout_s": 5.0, "is_required": False},
        ],
    }
    assert result.stdout.splitlines()[0] == "revision 2: registered: math@2"


def test_add_has_a_label_a_name_and_a_reason_by_default() -> None:
    _, (body,) = run({"GET /v1/rewards": rewards(), "POST /v1/rewards/routes": route()}, "add", "math", "length*0.1")
    assert AddBody.model_validate(body).label == "math + length*0.1"
    assert (body["who"], body["why"]) == (login_name(), "no reason given")


def test_add_says_if_no_server_offers_a_scorer_and_adds_it_nevertheless() -> None:
    result, bodies = run({"GET /v1/rewards": rewards(), "POST /v1/rewards/routes": route()}, "add", "maht")
    assert "no server offers scorer 'maht' yet; did you mean math?; offered are: length, math" in result.stdout
    assert len(bodies) == 1


def test_add_waits_and_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_POLL_S", 0.0)
    stages = [rewards(route(stage=stage)) for stage in ("registered", "registered", "checked", "ready")]
    answers = {"GET /v1/rewards": stages, "POST /v1/rewards/routes": route(stage="registered")}
    result, _ = run(answers, "add", "math", "--wait")
    assert result.exit_code == 0, result.exception
    *progress, hint = result.stdout.splitlines()
    assert progress == ["revision 2: registered: math@2", "revision 2: checked", "revision 2: ready"]
    # It can be pasted: the address goes with it.
    assert hint.startswith("try it beside the active one with: shoal reward shadow 2 --address 127.0.0.1:")


def test_add_fails_if_the_revision_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_POLL_S", 0.0)
    listed = [rewards(), rewards(route(stage="rejected", problem="math@2 of reward-0: empty batch"))]
    result, _ = run({"GET /v1/rewards": listed, "POST /v1/rewards/routes": route(stage="registered")}, "add", "math", "--wait")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "rejected: math@2 of reward-0: empty batch"


def test_add_gives_up_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_POLL_S", 0.3)
    answers = {"GET /v1/rewards": rewards(route(stage="checked")), "POST /v1/rewards/routes": route(stage="registered")}
    problem = failed(answers, "add", "math", "--wait", "--wait-s", "1")
    assert isinstance(problem, DeadlineError)
    assert "revision 2 is still checked after 1 s" in str(problem)


def test_add_reads_a_file(tmp_path: Path) -> None:
    file = tmp_path / "route.yaml"
    components = "components:\n- {scorer: math, weight: 0.5}\n- {scorer: style, parts: {tone: 2}, is_required: false}\n"
    file.write_text(f"label: both\n{components}addresses: ['h:1']\n")
    _, (body,) = run({"POST /v1/rewards/routes": route()}, "add", "--file", str(file), "--server", "h:2", "--json")
    parsed = AddBody.model_validate(body)
    assert (parsed.label, parsed.addresses) == ("both", ["h:1", "h:2"])
    assert [(part.scorer, part.weight, part.parts, part.is_required) for part in parsed.components] == [
        ("math", 0.5, {}, True),
        ("style", 1.0, {"tone": 2.0}, False),
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give either components"),
        (("math", "--file", "x.yaml"), "give either components"),
        (("math@",), "component 'math@' is not SCORER[@VERSION][*WEIGHT]"),
        (("math*heavy",), "weight 'heavy' of component 'math*heavy' is not a number"),
        (("math*nan",), "weight 'nan' of component 'math*nan' is not a number"),
        (("math", "--optional", "maht"), "--optional names 'maht', which is no component; did you mean math?; there is: math"),
        (("math", "--source", "gsm8k"), "--source 'gsm8k' is not SOURCE=SCORER"),
        (("--file", "missing.yaml"), "route missing.yaml does not exist"),
        (("--file", "missing.yaml", "--timeout-s", "3"), "write them into the file"),
    ],
)
def test_add_says_what_cannot_be_used_before_it_asks_anybody(arguments: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(app, ["reward", "add", *arguments, "--address", "127.0.0.1:1"])
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("components: []\n", "lists no components"),
        ("- math\n", "holds a list; it must be a mapping"),
        ("components: [{scorer: math, wieght: 2}]\n", "components.0.wieght is not a known key; did you mean components.weight?"),
        ("components: [{scorer: math, timeout_s: 0}]\n", "components.0.timeout_s is 0"),
        ("components: [{scorer: math, zz: red}]\n", "components.0.zz is not a known key; valid here: is_required, parts, scorer, sources,"),
        ("a: [\n", "route.yaml is not YAML: line 2, column 1"),
        ("[" * 5000, "is nested too deeply"),
        ("label: a\nlabel: b\n", "key 'label' is given twice"),
        ("!!python/object/apply:os.system [x]\n", "is not YAML"),
        ("", "is empty; it needs a mapping with label: and components:"),
        (f"components: [{', '.join(['{scorer: 1}'] * 9)}]\n", "; and 4 more"),
    ],
)
def test_add_says_what_is_wrong_with_a_file(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "route.yaml"
    file.write_text(content)
    text = str(failed({}, "add", "--file", str(file)))
    assert words in text
    assert "\n" not in text


@pytest.mark.parametrize(("share", "words"), [("0.25", "scores 25% of the groups"), ("0", "scores live groups no more; it is shadow")])
def test_shadow_starts_and_stops(share: str, words: str) -> None:
    result, (body,) = run({"POST /v1/rewards/routes/2/shadow": route(stage="shadow")}, "shadow", "2", "--share", share)
    assert ShadowBody.model_validate(body).share == float(share)
    assert words in result.stdout


def test_activate_without_gates_is_at_once() -> None:
    result, (body,) = run({"POST /v1/rewards/routes/2/activate": route(stage="active")}, "activate", "2", "--who", "ada")
    parsed = ActivateBody.model_validate(body)
    assert (parsed.who, parsed.gates, parsed.when_gates_pass) == ("ada", None, False)
    assert result.stdout == "revision 2 is active: the next groups are scored by math@2\n"


def test_activate_sends_gates_and_can_wait_for_them() -> None:
    gates = {"min_samples": 100, "min_rank_correlation": 0.9, "max_p99_ms": 50.0, "max_error_share": 0.01}
    armed = route(stage="shadow", gates=gates, gate_problems=["min_samples: 7 samples, fewer than 100"])
    arguments = ("--min-samples", "100", "--min-rank-correlation", "0.9", "--max-p99-ms", "50", "--max-error-share", "0.01")
    result, (body,) = run({"POST /v1/rewards/routes/2/activate": armed}, "activate", "2", *arguments, "--when-gates-pass")
    assert ActivateBody.model_validate(body).when_gates_pass
    assert body["gates"] == gates
    assert "min_rank_correlation 0.9, max_p99_ms 50, max_error_share 0.01): min_samples: 7 samples, fewer than 100" in result.stdout


def test_activate_names_the_gates_that_fail() -> None:
    what = "revision 2 does not pass its gates: min_samples: 7 samples; max_p99_ms: 80 ms, above 50 ms"
    problem = failed({"POST /v1/rewards/routes/2/activate": error(409, what)}, "activate", "2", "--min-samples", "100")
    assert isinstance(problem, StateError)
    assert str(problem) == what


def test_activate_later_needs_a_gate() -> None:
    assert "--when-gates-pass needs a gate" in str(failed({}, "activate", "2", "--when-gates-pass"))


def test_rollback_and_retire_say_what_is_now() -> None:
    result, (body,) = run({"POST /v1/rewards/rollback": route(1, "active")}, "rollback", "--why", "worse")
    assert ReasonBody.model_validate(body).why == "worse"
    assert result.stdout == "revision 1 is active again: the next groups are scored by math@2\n"
    result, (body,) = run({"POST /v1/rewards/routes/2/retire": route(stage="retired")}, "retire", "2")
    ReasonBody.model_validate(body)
    assert result.stdout == "revision 2 is retired\n"


def test_log_shows_who_did_what_when_and_why() -> None:
    entry = {"unix_s": 86400.0, "who": "ada", "why": "it\nis [b]better", "revision": 2, "stage": "active", "active": 2}
    gates = {"gates": {"min_samples": 5, "max_p99_ms": None}}
    entries = [
        {**entry, "seq": 7, "action": "activate", "detail": gates},
        {**entry, "seq": 8, "action": "add", "detail": {"label": "mix", "addresses": [], "components": [component(weight=2.0)]}},
    ]
    answer = LogModel.model_validate({"entries": entries}).model_dump(mode="json")
    result, _ = run({"GET /v1/rewards/log?limit=20": answer}, "log")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["no.", "when", "who", "action", "revision", "stage", "active", "why", "detail"]
    assert "ada  activate         2  active       2  it\\nis [b]better  gates: min_samples 5" in lines[1]
    assert lines[2].rstrip().endswith("label: mix; 2 math@2")


def test_slow_lists_samples_with_their_ids() -> None:
    sample = {"sample_id": "u/1/0", "scorer": "math", "version": "2", "service": "reward-0", "latency_ms": 812.34, "p99_ms": 40.0}
    answer = SlowSamplesModel.model_validate({"samples": [sample]}).model_dump(mode="json")
    result, _ = run({"GET /v1/rewards/slow": answer}, "slow")
    assert result.stdout.splitlines()[1].split() == ["u/1/0", "math@2", "reward-0", "812.3", "40.0"]
    result, _ = run({"GET /v1/rewards/slow": {"samples": []}}, "slow")
    assert "no sample has taken longer" in result.stdout


def test_errors_say_what_the_coordinator_said() -> None:
    missing = error(404, "the reward route has no revision 9; there is: 1, 2")
    problem = failed({"POST /v1/rewards/routes/9/retire": missing}, "retire", "9")
    assert isinstance(problem, NotFoundError)
    assert str(problem) == "the reward route has no revision 9; there is: 1, 2"
    unusable = error(422, "body.why: String should have at least 1 character", "correct body.why; /docs has its range")
    problem = failed({"POST /v1/rewards/rollback": unusable}, "rollback", "--why", "")
    assert isinstance(problem, InvalidRequestError)
    assert str(problem) == "body.why: String should have at least 1 character; correct body.why; /docs has its range"
    assert "answered 404: Not Found" in str(failed({}, "slow"))


def test_nobody_at_the_address_is_one_line() -> None:
    result = CliRunner().invoke(app, ["reward", "list", "--address", "127.0.0.1:1"])
    assert isinstance(result.exception, UnavailableError)
    assert "is the run up?" in str(result.exception)
