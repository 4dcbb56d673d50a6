"""The reward SDK: registration, names, versions."""

from __future__ import annotations

import pytest

from shoal.errors import ConfigError, NotFoundError
from shoal.reward import Row, ScorerRegistry, reward


def score(prompt: str, response: str, row: Row) -> float:
    """Half a point.

    For everybody.
    """
    return 0.5


def registry_of(*versions: str) -> ScorerRegistry:
    registry = ScorerRegistry()
    for version in versions:
        reward(name="half", version=version, registry=registry)(score)
    return registry


def test_reward_returns_the_function_unchanged_and_registers_it() -> None:
    registry = ScorerRegistry()
    assert reward(name="half", version="1", registry=registry)(score) is score
    (scorer,) = registry.all()
    assert (scorer.name, scorer.version, scorer.description) == ("half", "1", "Half a point.")
    assert scorer.function is score
    assert not scorer.is_async
    assert not scorer.is_batch


def test_reward_recognises_async_and_batch() -> None:
    registry = ScorerRegistry()

    @reward(name="later", version="1", batch=True, registry=registry)
    async def later(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float]:
        return [0.0] * len(prompts)

    scorer = registry.get("later")
    assert scorer.is_async
    assert scorer.is_batch


def test_reward_refuses_the_same_name_and_version_twice() -> None:
    registry = registry_of("1")
    with pytest.raises(ConfigError, match=r"'half' version '1' is registered twice .*test_sdk\.py"):
        reward(name="half", version="1", registry=registry)(score)
    reward(name="half", version="2", registry=registry)(score)


@pytest.mark.parametrize("name", ["", "Half", "1half", "half life", "half/1", "x" * 64, "half\n"])
def test_reward_refuses_bad_names(name: str) -> None:
    with pytest.raises(ConfigError, match=r"scorer name .* is invalid"):
        reward(name=name, version="1", registry=ScorerRegistry())(score)


@pytest.mark.parametrize("version", ["", " 1", "1 2", ".1", "1" * 33])
def test_reward_refuses_bad_versions(version: str) -> None:
    with pytest.raises(ConfigError, match=r"version .* of scorer 'half' is invalid"):
        reward(name="half", version=version, registry=ScorerRegistry())(score)


def test_reward_refuses_a_function_of_two_arguments() -> None:
    def short(prompt: str, response: str) -> float:
        return 0.0

    with pytest.raises(ConfigError, match=r"must take \(prompt, response, row\)"):
        reward(name="short", version="1", registry=ScorerRegistry())(short)


@pytest.mark.parametrize(
    ("versions", "newest"),
    [(("1.9", "1.10"), "1.10"), (("1.0", "1.0rc1"), "1.0"), (("1", "1.0.1"), "1.0.1"), (("2", "10", "9"), "10"), (("v2", "v10"), "v10")],
)
def test_registry_takes_the_newest_version_when_none_is_named(versions: tuple[str, ...], newest: str) -> None:
    assert registry_of(*versions).get("half").version == newest
    assert registry_of(*reversed(versions)).get("half").version == newest


def test_registry_finds_a_named_version() -> None:
    assert registry_of("1", "2").get("half", "1").version == "1"


def test_registry_lists_what_there_is_when_a_scorer_is_unknown() -> None:
    with pytest.raises(NotFoundError, match="no scorer 'whole'; there is: half 1, half 2"):
        registry_of("2", "1").get("whole")
    with pytest.raises(NotFoundError, match="no scorer 'half' version '3'; there is: half 1, half 2"):
        registry_of("2", "1").get("half", "3")
    with pytest.raises(NotFoundError, match="there is: none at all"):
        ScorerRegistry().get("half")
