"""Rules between fields: each refusal with its reason, each border that is still fine."""

from __future__ import annotations

from typing import Any

import pytest

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
        ({"rollout": {"min_new_tokens": 9, "max_new_tokens": 8}}, r"min_new_tokens is 9, above rollout\.max_new_tokens 8"),
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
        {"rollout": {"min_new_tokens": 8, "max_new_tokens": 8}},
        {"algorithm": {"kl_in": "none"}},
        {"algorithm": {"kl_in": "none", "kl_coef": 0}},
        {"rollout": {"min_servers": 2, "servers": 2}},
        {"algorithm": {"mini_batches": 256}},
        {"rollout": {"prompts_per_step": 1, "group_size": 2}, "actor": {"ranks": 2}, "critic": {"ranks": 2}},
        # No critic runs under a group estimator.
        {"algorithm": {"estimator": "grpo"}, "rollout": {"prompts_per_step": 1, "group_size": 2}, "critic": {"ranks": 64}},
        {"algorithm": {"estimator": "grpo", "value_clip": 0.1}},
        {"algorithm": {"old_logprobs": "rollout"}, "rollout": {"temperature": 0.7}},
        {"actor": {"micro_batch_tokens": 264}},
        {"coordinator": {"max_pending_groups": 32}},
        {"evaluation": {"every": 5}, "data": {"held_out": "h.jsonl"}},
        {"security": {"insecure": False, "ca_file": "a", "cert_file": "c", "key_file": "k"}},
    ],
)
def test_check_accepts_the_border(sections: dict[str, dict[str, Any]]) -> None:
    assert _build(**sections).run.id == "demo"


def test_check_lists_every_broken_rule() -> None:
    with pytest.raises(ConfigError, match="has 3 problems") as caught:
        _build(rollout={"top_p": 0.5, "top_k": 2, "min_servers": 2})
    assert len(str(caught.value).splitlines()) == 4


def test_check_without_kl_resolves_the_coefficient_to_zero() -> None:
    assert _build(algorithm={"kl_in": "none"}).algorithm.kl_coef == 0
    assert _build().algorithm.kl_coef == 0.01


def test_config_has_at_most_150_documented_fields() -> None:
    sections = [field.annotation for field in RunConfig.model_fields.values()]
    fields = [(name, field) for section in sections for name, field in section.model_fields.items()]  # type: ignore[union-attr]
    assert len(fields) <= 150
    assert [name for name, field in fields if not field.description] == []


def test_plaintext_push_follows_security_unless_it_is_set() -> None:
    tls = {"insecure": False, "ca_file": "a", "cert_file": "c", "key_file": "k"}
    assert _build().may_push_in_plaintext
    assert not _build(security=tls).may_push_in_plaintext
    assert _build(security=tls, push={"transport": "collective", "plaintext_collective": True}).may_push_in_plaintext
