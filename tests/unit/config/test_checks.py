"""Rules between fields: each refusal with its reason, each border that is still fine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shoal.config.load import build_config
from shoal.config.models import RunConfig
from shoal.errors import ConfigError


def _build(**sections: dict[str, Any]) -> RunConfig:
    base = {"run": {"id": "demo", "folder": "runs/demo"}, "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
    return build_config({name: base.get(name, {}) | sections.get(name, {}) for name in base.keys() | sections.keys()})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"algorithm": {"estimator": "grpo"}, "rollout": {"group_size": 1}},
            "estimator grpo .*group_size is 1: every advantage would be 0; set group_size to at least 2",
        ),
        ({"rollout": {"top_p": 0.9}}, r"rollout\.top_p is 0\.9: .*renormalises.*set it to 1"),
        ({"rollout": {"top_k": 5}}, r"rollout\.top_k is 5: .*renormalises.*set it to 0"),
        ({"rollout": {"min_new_tokens": 1}}, r"rollout\.min_new_tokens is 1: while a response is too short"),
        ({"evaluation": {"temperature": 0.001}}, r"evaluation\.temperature is 0\.001; the engine takes 0"),
        ({"algorithm": {"kl_in": "none", "kl_coef": 0.1}}, r"kl_coef is 0\.1 but algorithm\.kl_in is none"),
        # Written out, even at the default's value, it is a wish that would be ignored.
        ({"algorithm": {"kl_in": "none", "kl_coef": 0.01}}, r"kl_coef is 0\.01 but algorithm\.kl_in is none"),
        ({"rollout": {"min_servers": 2}}, r"min_servers is 2, above rollout\.servers 1"),
        ({"algorithm": {"mini_batches": 3}}, r"mini_batches is 3, which does not divide .*32 x 8 = 256"),
        (
            {"rollout": {"prompts_per_step": 1, "group_size": 2}, "actor": {"ranks": 3}},
            r"actor\.ranks x algorithm\.mini_batches = 3 x 1 = 3",
        ),
        (
            {"rollout": {"prompts_per_step": 2, "group_size": 2}, "critic": {"ranks": 2}, "algorithm": {"mini_batches": 4}},
            r"critic\.ranks x algorithm\.mini_batches = 2 x 4 = 8 exceeds .*2 x 2 = 4",
        ),
        ({"actor": {"micro_batch_tokens": 263}}, r"actor\.micro_batch_tokens is 263, below the longest sequence of 264"),
        ({"coordinator": {"max_pending_groups": 31}}, r"max_pending_groups is 31, below rollout\.prompts_per_step 32"),
        (
            {"rollout": {"prompts_per_step": 3, "group_size": 3}, "algorithm": {"mini_batches": 2}},
            r"mini_batches is 2, which does not divide rollout\.prompts_per_step x group_size = 3 x 3 = 9; choose a divisor",
        ),
        (
            {"evaluation": {"samples": 4}, "data": {"held_out": "h.jsonl"}},
            r"evaluation\.samples is 4 but evaluation\.temperature is 0, which is greedy",
        ),
        ({"critic": {"lora": {"rank": 4}}}, r"critic\.lora is set, but only the actor trains adapters"),
        (
            {"run": {"steps": 5}, "algorithm": {"critic_warmup_steps": 5}},
            r"critic_warmup_steps is 5 and run\.steps 5: the actor would never be trained",
        ),
        ({"evaluation": {"every": 5}}, r"evaluation\.every is 5 but data\.held_out is not set"),
        ({"actor": {"betas": [0.9, 1.0]}}, r"actor\.betas is \[0\.9, 1\.0\]"),
        ({"push": {"transfer_timeout_s": 86_400}}, r"are 86520 s together; a server keeps a push for 86400 s at most"),
        (
            {"push": {"commit": "rolling", "commit_timeout_s": 30_000}, "rollout": {"servers": 3}},
            r"commit 3 x\) are 90210 s together",
        ),
        ({"push": {"transport": "cuda_ipc"}, "actor": {"device": "cpu"}}, r"push\.transport is cuda_ipc but actor\.device is cpu"),
        (
            {"push": {"transport": "collective"}, "security": {"insecure": False, "ca_file": "a", "cert_file": "c", "key_file": "k"}},
            r"push\.transport is collective, which nothing encrypts, but security\.insecure is false",
        ),
        ({"security": {"insecure": False}}, r"security\.ca_file, security\.cert_file, security\.key_file not set"),
        ({"security": {"insecure": False, "ca_file": "a", "key_file": "k"}}, r"false but security\.cert_file not set"),
        ({"security": {"ca_file": "a"}}, r"security\.ca_file is set but security\.insecure is true"),
    ],
)
def test_check_refuses_with_the_reason(sections: dict[str, dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _build(**sections)


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"estimator": "grpo"}, "rollout": {"group_size": 2}},
        {"rollout": {"group_size": 1}},
        {"algorithm": {"kl_in": "none"}},
        {"algorithm": {"kl_in": "none", "kl_coef": 0}},
        {"rollout": {"min_servers": 2, "servers": 2}},
        {"algorithm": {"mini_batches": 256}},
        {"rollout": {"prompts_per_step": 1, "group_size": 2}, "actor": {"ranks": 2}, "critic": {"ranks": 2}},
        {"rollout": {"prompts_per_step": 3, "group_size": 3}, "algorithm": {"mini_batches": 3}},
        {"algorithm": {"old_logprobs": "rollout"}, "rollout": {"temperature": 0.7}},
        {"actor": {"micro_batch_tokens": 264}},
        {"coordinator": {"max_pending_groups": 32}},
        {"evaluation": {"every": 5}, "data": {"held_out": "h.jsonl"}},
        {"evaluation": {"samples": 4, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "max_new_tokens": 9}, "data": {"held_out": "h.jsonl"}},
        {"actor": {"packing": "on", "device": "cpu"}, "critic": {"packing": "off", "attention": "eager", "device": "cpu"}},
        {"actor": {"lora": {"rank": 4}}},
        # A run of no steps only evaluates.
        {"run": {"steps": 0}, "algorithm": {"critic_warmup_steps": 5}},
        {"run": {"steps": 6}, "algorithm": {"critic_warmup_steps": 5}},
        {"security": {"insecure": False, "ca_file": "a", "cert_file": "c", "key_file": "k"}},
    ],
)
def test_check_accepts_the_border(sections: dict[str, dict[str, Any]]) -> None:
    assert _build(**sections).run.id == "demo"


def test_check_lists_every_broken_rule() -> None:
    with pytest.raises(ConfigError, match="has 3 problems") as caught:
        _build(rollout={"top_p": 0.5, "top_k": 2, "min_servers": 2})
    assert len(str(caught.value).splitlines()) == 4


def test_config_has_at_most_180_documented_fields() -> None:
    fields = list(_fields(RunConfig))
    assert len(fields) <= 180
    assert [name for name, field in fields if not field.description] == []


def _fields(section: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        held = [part for part in (field.annotation, *get_args(field.annotation)) if isinstance(part, type) and issubclass(part, BaseModel)]
        if section is not RunConfig:
            yield name, field
        for nested in held:
            yield from _fields(nested)


@pytest.mark.parametrize(
    ("algorithm", "actor", "critic"),
    [({}, 60, 60), ({"critic_warmup_steps": 4}, 36, 60), ({"estimator": "grpo"}, 60, 60)],
)
def test_planned_updates_leave_out_the_steps_in_which_only_the_critic_trains(algorithm: dict[str, Any], actor: int, critic: int) -> None:
    config = _build(run={"steps": 10}, algorithm={"epochs": 3, "mini_batches": 2} | algorithm)
    assert (config.planned_actor_updates, config.planned_updates) == (actor, critic)


def test_plaintext_push_follows_security_unless_it_is_set() -> None:
    tls = {"insecure": False, "ca_file": "a", "cert_file": "c", "key_file": "k"}
    assert _build().may_push_in_plaintext
    assert not _build(security=tls).may_push_in_plaintext
    assert _build(security=tls, push={"transport": "collective", "plaintext_collective": True}).may_push_in_plaintext
