"""Names to functions, settings to parameters, and functions of a user's own module."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from shoal.algo import registry
from shoal.algo.advantages import AdvantageInputs
from shoal.algo.lookup import lookup
from shoal.config.algorithm import AlgorithmSection
from shoal.config.functions import ESTIMATORS, POLICY_LOSSES, VALUE_LOSSES, Entrypoint, Registered
from shoal.errors import ConfigError

TABLES: dict[str, tuple[Mapping[str, Registered], tuple[str, ...]]] = {
    "estimator": (ESTIMATORS, registry.ESTIMATOR_ARGUMENTS),
    "policy_loss": (POLICY_LOSSES, registry.POLICY_LOSS_ARGUMENTS),
    "value_loss": (VALUE_LOSSES, registry.VALUE_LOSS_ARGUMENTS),
}
LINES = [(setting, name) for setting, (table, _) in TABLES.items() for name in table]

USER_MODULE = """
import torch
from shoal.algo.losses import TokenLoss

CALLS = []

def loss(logprobs, old_logprobs, advantages, response_mask, *, alpha, clip_high, beta=2.0):
    CALLS.append((alpha, clip_high, beta))
    return TokenLoss(per_token=-alpha * advantages * logprobs)

def estimator(inputs, sum_over_ranks, *, scale=1.0):
    tokens = scale * inputs.response_mask.double()
    return tokens, tokens

def wrong_shape(logprobs, old_logprobs, advantages, response_mask):
    return TokenLoss(per_token=-(advantages * logprobs).sum())

def not_a_token_loss(logprobs, old_logprobs, advantages, response_mask):
    return -advantages * logprobs

def detached(logprobs, old_logprobs, advantages, response_mask):
    return TokenLoss(per_token=-(advantages * logprobs).detach())

def whole_numbers(logprobs, old_logprobs, advantages, response_mask):
    return TokenLoss(per_token=response_mask.long())

def python_metric(logprobs, old_logprobs, advantages, response_mask):
    return TokenLoss(per_token=-advantages * logprobs, sums={"ratio": 1.0})

def one_tensor(inputs, sum_over_ranks):
    return inputs.rewards

def three_tensors(inputs, sum_over_ranks):
    return inputs.rewards, inputs.rewards, inputs.rewards

def sequence_advantages(inputs, sum_over_ranks):
    return inputs.rewards.sum(dim=1), inputs.rewards.sum(dim=1)

def needy(logprobs, old_logprobs, advantages, response_mask, *, sharpness):
    return TokenLoss(per_token=logprobs)

def too_few(logprobs, advantages):
    return TokenLoss(per_token=logprobs)

constant = 7
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a module of the user's on the import path, forgotten afterwards."""
    (tmp_path / "shoal_user_functions.py").write_text(USER_MODULE)
    (tmp_path / "shoal_user_broken.py").write_text("raise RuntimeError('no licence file')\n")
    (tmp_path / "shoal_user_typo.py").write_text("def loss(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "shoal_user_functions"
    for name in ("shoal_user_functions", "shoal_user_broken", "shoal_user_typo"):
        sys.modules.pop(name, None)


def chosen(field: str, entrypoint: str, **settings: float) -> AlgorithmSection:
    return AlgorithmSection.model_validate({field: {"entrypoint": entrypoint, "settings": settings}})


def run_policy(algorithm: AlgorithmSection) -> torch.Tensor:
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    ones = torch.ones(2, 3)
    return registry.policy_loss(algorithm)(logprobs, ones, ones, ones.bool()).per_token


def run_estimator(algorithm: AlgorithmSection) -> torch.Tensor:
    inputs = AdvantageInputs(rewards=torch.ones(2, 3), response_mask=torch.ones(2, 3, dtype=torch.bool))
    return registry.advantage_estimator(algorithm)(inputs, lambda local: local)[0]


@pytest.mark.parametrize(("setting", "name"), LINES)
def test_registered_function_takes_settings_of_the_configuration_only(setting: str, name: str) -> None:
    table, arguments = TABLES[setting]
    signature = inspect.signature(registry.load_function(setting, name, table))
    positional = [p.name for p in signature.parameters.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert tuple(positional) == arguments
    keywords = [p for p in signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert {p.name for p in keywords} <= set(AlgorithmSection.model_fields)
    registry.bind(registry.load_function(setting, name, table), AlgorithmSection())


@pytest.mark.parametrize("setting", TABLES)
def test_unknown_name_is_refused_with_the_valid_ones(setting: str) -> None:
    table, _ = TABLES[setting]
    with pytest.raises(ConfigError, match=rf"algorithm\.{setting} is 'nothing'; use one of {', '.join(sorted(table))}"):
        registry.load_function(setting, "nothing", table)


def test_lookup_lists_the_valid_names() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.estimator is 'ppo'; use one of dr_grpo, gae, "):
        lookup(ESTIMATORS, "estimator", "ppo")


def test_bind_fills_settings_from_fields_of_the_same_name() -> None:
    def function(x: int, *, clip_low: float, dual_clip: float | None, extra: int = 7) -> tuple[int, float, float | None, int]:
        return x, clip_low, dual_clip, extra

    assert registry.bind(function, AlgorithmSection(clip_low=0.3, dual_clip=4.0))(1) == (1, 0.3, 4.0, 7)


@pytest.mark.parametrize("name", ["sharpness", "needs", "model_fields", "has_critic"])
def test_bind_refuses_a_setting_that_is_no_field(name: str) -> None:
    scope: dict[str, object] = {}
    exec(f"def needy(*, {name}): return {name}", scope)  # noqa: S102 - a signature of the given name
    needy = scope["needy"]
    assert callable(needy)
    with pytest.raises(ConfigError, match=f"needy needs the setting '{name}', which algorithm has not"):
        registry.bind(needy, AlgorithmSection())


def test_losses_take_their_bounds_from_the_configuration() -> None:
    one = torch.ones(1, 1)
    algorithm = AlgorithmSection(clip_high=0.5, value_clip=None)
    policy = registry.policy_loss(algorithm)(one, torch.zeros(1, 1), one, one.bool())
    assert float(policy.per_token) == pytest.approx(-1.5)
    value = registry.value_loss(algorithm)(3 * one, 0 * one, one, one.bool())
    assert float(value.per_token) == pytest.approx(2.0)


def test_user_loss_gets_its_settings_and_the_fields_of_the_configuration(user_module: str) -> None:
    algorithm = AlgorithmSection.model_validate(
        {"clip_high": 0.4, "policy_loss": {"entrypoint": f"{user_module}.loss", "settings": {"alpha": 0.3}}}
    )
    per_token = run_policy(algorithm)
    assert torch.allclose(per_token, torch.full((2, 3), 0.3))
    assert sys.modules[user_module].CALLS == [(0.3, 0.4, 2.0)]


def test_user_estimator_runs(user_module: str) -> None:
    algorithm = chosen("estimator", f"{user_module}.estimator", scale=3.0)
    assert torch.equal(run_estimator(algorithm), torch.full((2, 3), 3.0, dtype=torch.float64))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("shoal_user_nowhere.loss", "ModuleNotFoundError.*install the module where the trainer runs"),
        ("shoal_user_functions.missing", "missing"),
        ("shoal_user_broken.loss", "RuntimeError: no licence file"),
        ("shoal_user_typo.loss", "SyntaxError"),
        ("shoal_user_functions.constant", "is a int; give the path of a function"),
    ],
)
def test_entrypoint_that_cannot_be_loaded_is_refused(user_module: str, path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.policy_loss: {path} .*{message}"):
        registry.policy_loss(chosen("policy_loss", path))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("needy", {}, "needy needs the setting 'sharpness'"),
        ("loss", {}, "loss needs the setting 'alpha'"),
        ("loss", {"alpha": 1.0, "clip_high": 0.1}, r"settings\.clip_high is also a field of algorithm; set algorithm\.clip_high"),
        ("loss", {"alpha": 1.0, "alhpa": 1.0}, "has no setting 'alhpa'; it takes alpha, clip_high, beta"),
        ("loss", {"alpha": 1.0, "logprobs": 1.0}, "has no setting 'logprobs'"),
        ("too_few", {}, r"cannot be called as \(logprobs, old_logprobs, advantages, response_mask\): too many positional"),
    ],
)
def test_entrypoint_whose_settings_do_not_fit_is_refused(user_module: str, name: str, settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.policy_loss(chosen("policy_loss", f"{user_module}.{name}", **settings))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong_shape", r"per_token of shape \(\); it must be that of response_mask, \(2, 3\)"),
        ("not_a_token_loss", r"a tensor of shape \(2, 3\); return a shoal\.algo\.losses\.TokenLoss"),
        ("detached", "per_token without a gradient"),
        ("whole_numbers", r"per_token of torch\.int64; return floating point"),
        ("python_metric", "metric 'ratio' as a float"),
    ],
)
def test_result_of_a_user_loss_is_checked_on_first_use(user_module: str, name: str, message: str) -> None:
    path = f"{user_module}.{name}"
    with pytest.raises(ConfigError, match=rf"algorithm\.policy_loss: {path} returned {message}"):
        run_policy(chosen("policy_loss", path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_tensor", r"a tensor of shape \(2, 3\); return the two tensors \(advantages, returns\)"),
        ("three_tensors", "a tuple of 3; return the two tensors"),
        ("sequence_advantages", r"advantages of shape \(2,\); it must be that of response_mask, \(2, 3\)"),
    ],
)
def test_result_of_a_user_estimator_is_checked_on_first_use(user_module: str, name: str, message: str) -> None:
    path = f"{user_module}.{name}"
    with pytest.raises(ConfigError, match=rf"algorithm\.estimator: {path} returned {message}"):
        run_estimator(chosen("estimator", path))


def test_result_of_a_user_value_loss_is_checked_on_first_use(user_module: str) -> None:
    function = registry.value_loss(chosen("value_loss", f"{user_module}.not_a_token_loss"))
    one = torch.ones(1, 1)
    with pytest.raises(ConfigError, match=r"algorithm\.value_loss: .* return a shoal\.algo\.losses\.TokenLoss"):
        function(one, one, one, one.bool())


def test_only_the_first_result_is_checked() -> None:
    checked: list[object] = []

    def check(result: object, arguments: tuple[object, ...]) -> str | None:
        checked.append(result)
        return None if result == 1 else "something else"

    function = registry._CheckedOnce(lambda x: x, "here", check)
    with pytest.raises(ConfigError, match="here returned something else"):
        function(2)
    assert [function(1), function(2), function(3)] == [1, 2, 3]
    assert checked == [2, 1]


def test_entrypoint_names_what_it_needs() -> None:
    algorithm = AlgorithmSection(estimator=Entrypoint(entrypoint="my_pkg.mine", needs=("critic", "groups")))
    assert algorithm.needs == {"critic", "groups"}
    assert algorithm.has_critic
