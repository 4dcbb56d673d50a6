"""The REST API of reward routes over a real lifecycle with scripted servers: what it answers, and every way to be refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from shoal_coordinator.backend_rewards import RouteBackend
from shoal_coordinator.rest import create_app
from shoal_coordinator.rewards.comparison import Comparison, Sides, WorstCase
from shoal_coordinator.rewards.route_stages import RouteStage
from shoal_coordinator.rewards.row_check import RowFinding, RowTally

from shoal.errors import StateError
from tests.helpers.lifecycle_fakes import LifecycleHarness, passing, scorer
from tests.unit.coordinator.test_rest import ScriptedBackend

SIGNED = {"who": "ada", "why": "because"}
COMPONENT = {
    "scorer": "math",
    "version": "",
    "fingerprint": "",
    "weight": 0.5,
    "parts": {"right": 2.0},
    "timeout_s": 7.0,
    "is_required": True,
    "sources": [],
}
GATES = {"min_samples": 50, "min_rank_correlation": None, "max_p99_ms": None, "max_error_share": 0.1}


class Api:
    """Requests, and the lifecycle behind them."""

    def __init__(self, routes: LifecycleHarness, client: httpx.AsyncClient) -> None:
        self.routes = routes
        self.client = client

    async def get(self, path: str, status: int = 200) -> Any:  # noqa: ANN401
        answer = await self.client.get(f"/v1/rewards{path}")
        assert answer.status_code == status, answer.text
        return answer.json()

    async def post(self, path: str, status: int = 200, **body: object) -> Any:  # noqa: ANN401
        # Not json=: httpx refuses to send NaN.
        headers = {"content-type": "application/json"}
        answer = await self.client.post(f"/v1/rewards{path}", content=json.dumps(SIGNED | body), headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def add(self, stage: RouteStage) -> int:
        """A revision that is ready, or shadows."""
        number: int = (await self.post("/routes", label="new", components=[{"scorer": "math"}]))["number"]
        await self.routes.until(number, RouteStage.READY)
        if stage is RouteStage.SHADOW:
            await self.post(f"/routes/{number}/shadow", share=1.0)
        return number

    async def refused(self, path: str, status: int, **body: object) -> dict[str, str]:
        """A refusal: always with what, value and fix."""
        error: dict[str, str] = (await self.post(path, status, **body))["error"]
        assert set(error) == {"what", "value", "fix"}
        assert all(error.values())
        return error


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with LifecycleHarness(tmp_path, ready_timeout_s=1.0) as routes:
        transport = httpx.ASGITransport(app=create_app(ScriptedBackend(), RouteBackend(routes.path)))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://coordinator", headers={"content-type": "application/json"}
        ) as client:
            await routes.begin()
            yield Api(routes, client)


async def test_rewards_shows_revisions_and_servers(api: Api) -> None:
    api.routes.servers.join("reward-1", scorer(fingerprint="f2"))
    api.routes.servers.join("reward-2", suspect=True).problem = "connection refused"
    found = await api.get("")
    assert found["active"] == 1
    (revision,) = found["revisions"]
    record = api.routes.book.record(1)
    assert revision == {
        "number": 1,
        "label": "configuration",
        "stage": "active",
        "components": [COMPONENT | {"version": "1", "fingerprint": "f1", "weight": 1.0, "parts": {}}],
        "created_unix_s": record.created_unix_s,
        "stage_since_unix_s": record.stage_since_unix_s,
        "num_open_groups": 0,
        "problem": None,
        "shadow_share": None,
        "gates": None,
        "gate_problems": [],
    }
    assert found["servers"][0] == {
        "service_id": "reward-0",
        "address": "reward-0:1",
        "is_static": False,
        "state": "ready",
        "problem": None,
        "scorers": [{"name": "math", "version": "1", "fingerprint": "f1", "description": "math of a test"}],
    }
    assert [(server["service_id"], server["state"]) for server in found["servers"]] == [
        ("reward-0", "ready"),
        ("reward-1", "other code under the same version"),
        ("reward-2", "silent"),
    ]
    assert found["servers"][1]["problem"].startswith("math@1 is other code under the same version (f2)")
    assert found["servers"][2]["problem"] == "connection refused"


async def test_rewards_count_checked_rows_once_the_check_has_begun(api: Api) -> None:
    assert (await api.get(""))["rows"] is None
    tally = api.routes.rows.tally = RowTally()
    tally.checked.update({"": 5})
    for status in ("not_scored", "error", "not_correct"):
        tally.findings.append(RowFinding(row_index=0, data="train", source="", scorer="math@1", status=status, message=""))
    assert (await api.get(""))["rows"] == {"num_checked": 5, "num_unscored": 2, "num_not_correct": 1}


async def test_rewards_go_from_added_to_retired(api: Api) -> None:
    added = await api.post("/routes", label="shorter", components=[{"scorer": "math", "weight": 0.5, "parts": {"right": 2}}])
    assert (added["number"], added["label"], added["stage"], added["components"]) == (2, "shorter", "registered", [COMPONENT])
    await api.routes.until(2, RouteStage.READY)
    assert (await api.post("/routes/2/shadow", share=0.25))["shadow_share"] == 0.25
    assert (await api.post("/routes/2/shadow", share=0))["stage"] == "ready"
    pin = api.routes.book.pin()
    active = await api.post("/routes/2/activate")
    assert (active["stage"], active["components"][0]["fingerprint"]) == ("active", "f1")
    first = (await api.get(""))["revisions"][0]
    assert (first["stage"], first["num_open_groups"]) == ("draining", 1)
    assert (await api.post("/rollback"))["number"] == 1
    pin.release()
    await api.routes.until(2, RouteStage.DRAINED)
    assert (await api.post("/routes/2/retire"))["stage"] == "retired"


async def test_rewards_arm_gates_and_say_what_they_miss(api: Api) -> None:
    number = await api.add(RouteStage.SHADOW)
    armed = await api.post(f"/routes/{number}/activate", gates=GATES, when_gates_pass=True)
    assert (armed["stage"], armed["gates"]) == ("shadow", GATES)
    assert armed["gate_problems"][0] == "min_samples: 0 samples were scored by both revisions, fewer than 50"
    api.routes.shadow.comparisons[number] = passing(number)
    await api.routes.until(number, RouteStage.ACTIVE)
    route = (await api.get(""))["revisions"][number - 1]
    assert (route["gates"], route["gate_problems"]) == (None, [])


async def test_rewards_refuse_gates_that_fail_and_name_each(api: Api) -> None:
    number = await api.add(RouteStage.SHADOW)
    error = await api.refused(f"/routes/{number}/activate", 409, gates=GATES)
    assert "min_samples: 0 samples" in error["what"]
    assert "max_error_share: revision 2 was asked for no sample" in error["what"]
    assert error["fix"] == "look at /v1/rewards and try again when the state allows it"
    assert (await api.get(""))["active"] == 1


async def test_rewards_show_why_a_revision_was_rejected(api: Api) -> None:
    added = await api.post("/routes", label="typo", components=[{"scorer": "maths"}])
    await api.routes.until(added["number"], RouteStage.REJECTED)
    route = (await api.get(""))["revisions"][-1]
    assert route["problem"] == "no reward server offers scorer 'maths'; there is: math 1 (reward-0)"


async def test_rewards_log_says_who_when_and_why(api: Api) -> None:
    await api.add(RouteStage.READY)
    api.routes.book.pin()  # revision 1 is not drained
    await api.post("/routes/2/activate", who="bob", why="ünïcode")
    entries = (await api.get("/log"))["entries"]
    assert [entry["seq"] for entry in entries] == list(range(len(entries)))
    last = entries[-1]
    assert {key: last[key] for key in ("who", "why", "action", "revision", "stage", "active", "detail")} == {
        "who": "bob",
        "why": "ünïcode",
        "action": "activate",
        "revision": 2,
        "stage": "active",
        "active": 2,
        "detail": {},
    }
    assert (await api.get("/log?limit=1"))["entries"] == [last]
    await api.get("/log?limit=0", 422)


async def test_rewards_compare(api: Api) -> None:
    number = await api.add(RouteStage.SHADOW)
    worst = WorstCase(sample_id="u/0/1", prompt="p", response="r", active=1.0, shadow=-1.0)
    api.routes.shadow.comparisons[number] = Comparison(
        number=number, active=1, num_samples=2, spearman=0.5, mean=Sides(active=1.0, shadow=0.25), points=((1.0, 0.5),), worst=(worst,)
    )
    found = await api.get(f"/routes/{number}/comparison")
    assert {key: found[key] for key in ("number", "active", "num_samples", "spearman", "pearson", "mean", "points", "worst")} == {
        "number": number,
        "active": 1,
        "num_samples": 2,
        "spearman": 0.5,
        "pearson": None,
        "mean": {"active": 1.0, "shadow": 0.25},
        "points": [[1.0, 0.5]],
        "worst": [{"sample_id": "u/0/1", "prompt": "p", "response": "r", "active": 1.0, "shadow": -1.0}],
    }
    assert found["latency_ms"] == {"active": {"p50": None, "p95": None, "p99": None}, "shadow": {"p50": None, "p95": None, "p99": None}}


async def test_rewards_list_slow_samples(api: Api) -> None:
    for number in range(200):
        api.routes.slow.note("math", "1", "reward-0", f"u{number}/0/1", 1.0)
    api.routes.slow.note("math", "1", "reward-0", "slow/0/1", 50.0)
    assert (await api.get("/slow"))["samples"] == [
        {"sample_id": "slow/0/1", "scorer": "math", "version": "1", "service": "reward-0", "latency_ms": 50.0, "p99_ms": 1.0}
    ]


async def test_rewards_ask_addresses_and_show_silent_ones(api: Api) -> None:
    await api.post("/routes", label="far", components=[{"scorer": "far"}], addresses=["127.0.0.1:1"])
    api.routes.statics._problems["127.0.0.1:1"] = "connection refused"
    server = (await api.get(""))["servers"][0]
    assert server == {
        "service_id": "127.0.0.1:1",
        "address": "127.0.0.1:1",
        "is_static": True,
        "state": "silent",
        "problem": "connection refused",
        "scorers": [],
    }
    assert api.routes.book.addresses() == ("127.0.0.1:1",)


@pytest.mark.parametrize("path", ["/routes/9/shadow", "/routes/9/activate", "/routes/9/retire"])
async def test_rewards_answer_404_to_an_unknown_revision(api: Api, path: str) -> None:
    error = await api.refused(path, 404, **({"share": 0.5} if path.endswith("shadow") else {}))
    assert error["what"] == "the reward route has no revision 9; there is: 1"
    assert "/v1/rewards lists" in error["fix"]


async def test_rewards_answer_404_to_an_unknown_comparison(api: Api) -> None:
    assert (await api.get("/routes/9/comparison", 404))["error"]["what"].startswith("the reward route has no revision 9")


@pytest.mark.parametrize(
    ("path", "body", "what"),
    [
        ("/routes/1/shadow", {"share": 0.5}, "cannot go from active to shadow; allowed from here: draining"),
        ("/routes/1/shadow", {"share": 0}, "is active; stop_shadow needs one that is shadow"),
        ("/routes/1/activate", {}, "cannot go from active to active"),
        ("/routes/1/activate", {"gates": {}, "when_gates_pass": True}, "is active; arm needs one that is shadow"),
        ("/routes/1/retire", {}, "cannot go from active to retired"),
        ("/rollback", {}, "there is nothing to roll back to"),
    ],
)
async def test_rewards_answer_409_to_what_the_stage_forbids(api: Api, path: str, body: dict[str, object], what: str) -> None:
    assert what in (await api.refused(path, 409, **body))["what"]


@pytest.mark.parametrize(
    ("path", "body", "what"),
    [
        ("/routes", {"components": [{"scorer": "math"}]}, "body.label: Field required"),
        ("/routes", {"label": "", "components": [{"scorer": "math"}]}, "body.label"),
        ("/routes", {"label": "l", "components": []}, "body.components"),
        ("/routes", {"label": "l", "components": [{"scorer": "math", "colour": 1}]}, "body.components.0.colour: Extra inputs"),
        ("/routes", {"label": "l", "components": [{"scorer": "math", "weight": float("nan")}]}, "body.components.0.weight"),
        ("/routes", {"label": "l", "components": [{"scorer": "math", "timeout_s": 0}]}, "body.components.0.timeout_s"),
        ("/routes", {"label": "l", "components": [{"scorer": "math", "parts": {"a": float("inf")}}]}, "body.components.0.parts.a"),
        (
            "/routes",
            {"label": "l", "components": [{"scorer": "math"}, {"scorer": "math"}]},
            "component 2 ('math') scores the same rows twice",
        ),
        ("/routes", {"label": "l", "components": [{"scorer": "math", "is_required": False}]}, "would have no reward"),
        ("/routes", {"label": "l", "components": [{"scorer": "math", "sources": ["a"]}]}, "would have no reward"),
        ("/routes", {"label": "l", "components": [{"scorer": "math", "timeout_s": -1}]}, "body.components.0.timeout_s"),
        ("/routes", {"label": "l", "components": [{"scorer": "math", "timeout_s": 1e12}]}, "body.components.0.timeout_s"),
        ("/routes", {"label": "l", "components": [{"scorer": "math", "weight": 1e308}]}, "weight is 1e+308: float32 cannot hold it"),
        ("/routes", {"label": "l", "components": [{"scorer": "math", "weight": "much"}]}, "body.components.0.weight"),
        ("/routes", {"label": "l", "components": [{"scorer": "ma\nth"}]}, "component 1 ('ma\\nth') is no name of a scorer"),
        ("/routes", {"label": "l", "components": [{"scorer": f"s{number}"} for number in range(10_000)]}, "at most 32 items"),
        ("/routes", {"label": "l", "components": [{"scorer": "math"}], "addresses": ["here"]}, "address 'here' is not host:port"),
        ("/routes", {"label": "l", "components": [{"scorer": "math"}], "addresses": [":0"]}, "address ':0' is not host:port"),
        (
            "/routes",
            {"label": "l", "components": [{"scorer": "math"}], "addresses": ["http://x:5"]},
            "address 'http://x:5' is not host:port",
        ),
        ("/routes", {"label": "l", "components": [{"scorer": "math"}], "addresses": ["a\n:5"]}, "address 'a\\n:5' is not host:port"),
        ("/routes", {"label": "l\u202e", "components": [{"scorer": "math"}]}, "control characters"),
        ("/routes", {"label": "l", "components": [{"scorer": "math"}], "who": "a\nb"}, "who 'a\\nb' has control characters"),
        ("/routes", {"label": "l", "components": [{"scorer": "math"}], "why": "x" * 501}, "body.why"),
        ("/routes/1/shadow", {"share": 2}, "body.share"),
        ("/routes/1/shadow", {}, "body.share: Field required"),
        ("/routes/1/shadow", {"share": float("nan")}, "body.share"),
        ("/routes/1/shadow", {"share": -0.5}, "body.share"),
        ("/routes/0/shadow", {"share": 0.5}, "path.number"),
        ("/routes/-1/retire", {}, "path.number"),
        ("/routes/x/retire", {}, "path.number"),
        ("/routes/1/activate", {"when_gates_pass": True}, "when_gates_pass is true, but gates is null"),
        ("/routes/1/activate", {"gates": {"max_error_share": 1.5}}, "body.gates.max_error_share"),
        ("/routes/1/activate", {"gates": {"min_sample": 1}}, "body.gates.min_sample: Extra inputs"),
        ("/rollback", {"who": ""}, "body.who"),
        ("/rollback", {"why": "\u0007"}, "control characters"),
    ],
)
async def test_rewards_answer_422_to_a_body_that_cannot_be_used(api: Api, path: str, body: dict[str, object], what: str) -> None:
    before = api.routes.book.entries(100)
    assert what in (await api.refused(path, 422, **body))["what"]
    assert api.routes.book.entries(100) == before


@pytest.mark.parametrize(
    ("content", "status", "what"),
    [
        (b"", 422, "body: Field required"),
        (b"[1, 2]", 422, "body: Input should be a valid dictionary"),
        (b'"text"', 422, "body: Input should be a valid dictionary"),
        (b'{"who": "ada", "wh', 422, "the body is not JSON: Unterminated string"),
        (b'{"who": "\xff"}', 400, "parsing the body"),
        (b"[" * 100_000, 400, "parsing the body"),
        (b'{"who": ' + b"[" * 900 + b"]" * 900 + b', "why": "b"}', 422, "body.who"),
        (b'{"who": "ada", "why": "b", "more": "' + b"x" * 900_000 + b'"}', 422, "body.more: Extra inputs"),
        (b'{"who": "ada", "why": "' + b"x" * 20_000_000 + b'"}', 413, "more than 1048576 bytes"),
    ],
    ids=["empty", "list", "text", "truncated", "not utf-8", "deep", "deep value", "large", "20 MB"],
)
async def test_rewards_refuse_a_body_that_is_none_in_a_few_words(api: Api, content: bytes, status: int, what: str) -> None:
    before = api.routes.book.entries(100)
    answer = await api.client.post("/v1/rewards/rollback", content=content)
    assert answer.status_code == status, answer.text[:500]
    error = answer.json()["error"]
    assert what in error["what"]
    assert set(error) == {"what", "value", "fix"}
    assert all(error.values())
    assert len(answer.content) < 2000
    assert api.routes.book.entries(100) == before


async def test_rewards_answer_409_when_the_disk_fails(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    await api.add(RouteStage.READY)

    def fail(entry: object) -> None:
        raise StateError("cannot write reward_routes.jsonl (No space left on device): nothing has changed; make room")

    monkeypatch.setattr(api.routes.book._log, "append", fail)
    assert "No space left" in (await api.refused("/routes/2/activate", 409))["what"]
    assert (await api.get(""))["active"] == 1


async def test_one_of_two_activations_at_once_wins(api: Api) -> None:
    number = await api.add(RouteStage.READY)
    answers = await asyncio.gather(
        *(api.client.post(f"/v1/rewards/routes/{number}/activate", json={"who": who, "why": "race"}) for who in ("a", "b"))
    )
    assert sorted(answer.status_code for answer in answers) == [200, 409]
    winner = next(who for who, answer in zip("ab", answers, strict=True) if answer.status_code == 200)
    entries = [entry for entry in (await api.get("/log"))["entries"] if entry["action"] == "activate"]
    assert [entry["who"] for entry in entries] == ["configuration", winner]


async def test_rewards_cannot_be_changed_before_the_run_has_begun(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path) as routes:
        transport = httpx.ASGITransport(app=create_app(ScriptedBackend(), RouteBackend(routes.path)))
        async with httpx.AsyncClient(transport=transport, base_url="http://coordinator") as client:
            api = Api(routes, client)
            assert (await api.get(""))["active"] == 0
            error = await api.refused("/routes", 409, label="l", components=[{"scorer": "math"}])
            assert "the run has not begun" in error["what"]


async def test_rewards_openapi_documents_every_answer(api: Api) -> None:
    paths = (await api.client.get("/openapi.json")).json()["paths"]
    for path in ("", "/log", "/slow", "/routes/{number}/comparison"):
        assert paths[f"/v1/rewards{path}"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
    for command in ("shadow", "activate", "retire"):
        assert {"200", "404", "409", "422"} <= set(paths[f"/v1/rewards/routes/{{number}}/{command}"]["post"]["responses"])
    assert {"200", "409", "422"} <= set(paths["/v1/rewards/rollback"]["post"]["responses"])
