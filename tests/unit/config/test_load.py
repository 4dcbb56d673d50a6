"""Reading, overriding, refusing and writing configurations."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import yaml

from shoal.config.checks import resolve_config
from shoal.config.load import build_config, dump_config, load_config, load_preset
from shoal.config.masking import mask_url
from shoal.config.models import RedisSection, RunConfig
from shoal.errors import ConfigError
from shoal.security.secrets import mask_url as public_mask_url

BASE = "run: {id: demo, folder: runs/demo}\nmodel: {path: model}\ndata: {train: train.jsonl}\n"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(BASE)
    return path


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "other.yaml"
    path.write_text(text)
    return path


def _error(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_load_fills_defaults(base: Path) -> None:
    config = load_config(base)
    assert config == resolve_config(RunConfig.model_validate(yaml.safe_load(BASE)))
    assert (config.run.id, config.algorithm.estimator) == ("demo", "gae")


def test_load_overrides_are_parsed_as_yaml_and_the_last_wins(base: Path) -> None:
    overrides = [
        "run.steps=3",
        "run.steps=4",
        "actor.lr=1e-4",
        "algorithm.value_clip=null",
        "reward.modules=[a, b.py]",
        "rollout.ignore_eos=true",
        "redis.url=redis://h:1/0?x=a=b",
        'run.id="007"',
    ]
    config = load_config(base, overrides)
    assert (config.run.steps, config.actor.lr, config.algorithm.value_clip) == (4, 1e-4, None)
    assert (config.reward.modules, config.rollout.ignore_eos) == (("a", "b.py"), True)
    assert (config.redis.url, config.run.id) == ("redis://h:1/0?x=a=b", "007")


@pytest.mark.parametrize("text", ["on", '"on"', "off", "auto"])
def test_load_takes_the_delta_setting_with_and_without_quotes(base: Path, text: str) -> None:
    assert load_config(base, [f"push.delta={text}"]).push.delta == text.strip('"')


def test_load_override_builds_an_absent_or_empty_section(tmp_path: Path) -> None:
    path = _write(tmp_path, BASE + "rollout:\n")
    config = load_config(path, ["rollout.group_size=4", "critic.ranks=2"])
    assert (config.rollout.group_size, config.critic.ranks) == (4, 2)
    assert load_config(path).rollout.group_size == 8


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.grop_size=4", "rollout.grop_size is not a known key; did you mean rollout.group_size?"),
        ("rolout.group_size=4", "rolout is not a known key; did you mean rollout?"),
        ("rollout.steps=4", "rollout.steps is not a known key; did you mean run.steps?"),
        ("algorithm.klcoef=0.1", "did you mean algorithm.kl_coef?"),
        ("data.max_prompt_token=9", "did you mean data.max_prompt_tokens?"),
        ("model.xyzzy=1", "model.xyzzy is not a known key; valid here: path, reference_path, trust_remote_code"),
    ],
)
def test_load_unknown_key_names_the_nearest_valid_one(base: Path, override: str, message: str) -> None:
    assert message in _error(base, override)


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("run.steps=abc", ("run.steps is 'abc'", "valid integer", "Training steps", "change the value")),
        ("run.steps=1.5", ("run.steps is 1.5", "integer")),
        ("run.steps=-1", ("run.steps is -1", "greater than or equal to 0")),
        ("run.id=7", ("run.id is 7", "quotes")),
        ("run.id=Bad Name", ("run.id is 'Bad Name'", "pattern")),
        ("reward.version=", ("reward.version is None", 'write ""')),
        ("rollout.temperature=0", ("rollout.temperature is 0", "greater than or equal to 0.01", "greedy (0) is refused")),
        (
            "algorithm.estimator=ppo",
            ("algorithm.estimator is 'ppo'", "'gae'", "'grpo'", "entrypoint: package.module", "(ppo is a policy_loss)"),
        ),
        (
            "algorithm.policy_loss=grpo",
            ("algorithm.policy_loss is 'grpo'", "'cispo', 'gspo', 'ppo', 'reinforce'", "(grpo is an estimator)"),
        ),
        ("algorithm.value_loss=mse", ("algorithm.value_loss is 'mse'; use one of 'clipped'",)),
        ("algorithm.estimator=5", ("algorithm.estimator is 5, but it must be a name, or {entrypoint: package.module.function}",)),
        (
            "algorithm.policy_loss={entrypoint: nodots}",
            ("algorithm.policy_loss.entrypoint is 'nodots', but it is no dotted path", "my_pkg"),
        ),
        ("algorithm.policy_loss={settings: {}}", ("algorithm.policy_loss.entrypoint is missing (package.module.function",)),
        ("algorithm.policy_loss={entrypoint: a.b, setings: {}}", ("did you mean algorithm.policy_loss.settings?",)),
        (
            "algorithm.policy_loss={entrypoint: a.b, settings: {alpha: [1]}}",
            ("algorithm.policy_loss.settings.alpha is [1], but it must be a number, a text or a truth value",),
        ),
        ("algorithm.estimator={entrypoint: a.b, needs: [crtic]}", ("algorithm.estimator.needs.0 is 'crtic'", "'critic', 'groups'")),
        ("actor.lora=true", ("actor.lora is True, but it is a section",)),
        ("actor.lora.rnk=4", ("actor.lora.rnk is not a known key; did you mean actor.lora.rank?",)),
        ("actor.betas=[0.9]", ("actor.betas.1 is missing",)),
        ("rollout=5", ("rollout is 5", "it is a section")),
        ("telemetry.metrics_port=99999", ("telemetry.metrics_port is 99999", "65535")),
    ],
)
def test_load_wrong_value_says_what_value_and_fix(base: Path, override: str, fragments: tuple[str, ...]) -> None:
    message = _error(base, override)
    for fragment in (str(base), *fragments):
        assert fragment in message


def test_load_lists_all_problems_at_once(base: Path) -> None:
    message = _error(base, "run.steps=abc", "rollout.grop_size=1", "actor.lr=-1")
    assert "has 3 problems" in message
    assert all(key in message for key in ("run.steps", "rollout.grop_size", "actor.lr"))


@pytest.mark.parametrize("override", ["run.steps", "=3", "run..steps=1", ".=1", ""])
def test_load_malformed_override_is_refused(base: Path, override: str) -> None:
    assert f"--set '{override}' is not section.field=value" in _error(base, override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.id.x=1", "--set run.id.x: run.id is not a section but text"),
        ("run.steps=[1", "--set run.steps: the value is not YAML"),
    ],
)
def test_load_override_that_cannot_be_applied_is_refused(base: Path, override: str, message: str) -> None:
    assert message in _error(base, override)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; it needs a mapping of sections such as 'run:' and 'model:', at least run, model, data"),
        ("# only a comment\n", "is empty"),
        ("- a\n- b\n", "holds a list; it must be a mapping"),
        ("just text", "holds a text; it must be a mapping"),
        ("run: [\n", "is not YAML: line 2"),
        ("run: {id: a, id: b}\n", "line 1, column 14: key 'id' is given twice"),
        ("run: {id: a}\nrun: {id: b}\n", "line 2, column 1: key 'run' is given twice"),
        ("run: !!python/object/apply:os.system ['true']\n", "is not YAML: line 1"),
        ("run:\n", "run.id is missing"),
    ],
)
def test_load_unusable_file_says_why(tmp_path: Path, text: str, message: str) -> None:
    path = _write(tmp_path, text)
    error = _error(path)
    assert message in error
    assert str(path) in error


def test_load_missing_folder_and_binary_files_say_why(tmp_path: Path) -> None:
    assert "does not exist; check the path" in _error(tmp_path / "nope.yaml")
    assert "cannot be read (Is a directory)" in _error(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"run: \xff\xfe")
    assert "is not UTF-8 text (byte 5)" in _error(binary)


@pytest.mark.parametrize("override", ["redis.url=[redis://u:hunter2@h:1/0]", "redis.urll=redis://u:hunter2@h:1", "redis://u:hunter2@h:1"])
def test_load_messages_never_show_a_password(base: Path, override: str) -> None:
    assert "hunter2" not in _error(base, override)


def test_load_yaml_problem_does_not_quote_the_line(tmp_path: Path) -> None:
    assert "hunter2" not in _error(_write(tmp_path, "redis: {url: 'redis://u:hunter2@h:1'\nrun: ["))


def test_dump_round_trips_and_is_private(base: Path, tmp_path: Path) -> None:
    config = load_config(base, ["redis.url=redis://u:hunter2@h:1/0", "algorithm.kl_in=none", "actor.betas=[0.8, 0.9]"])
    target = tmp_path / "new" / "resolved.yaml"
    dump_config(config, target)
    assert load_config(target) == config
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert [path.name for path in target.parent.iterdir()] == ["resolved.yaml"]


def test_dump_writes_every_field(base: Path, tmp_path: Path) -> None:
    dump_config(load_config(base), tmp_path / "out.yaml")
    tree = yaml.safe_load((tmp_path / "out.yaml").read_text())
    assert {name: set(section) for name, section in tree.items()} == {
        name: set(field.annotation.model_fields)  # type: ignore[union-attr]
        for name, field in RunConfig.model_fields.items()
    }


def test_dump_of_a_python_built_config_without_kl_loads_again(tmp_path: Path) -> None:
    config = RunConfig.model_validate(yaml.safe_load(BASE) | {"algorithm": {"kl_in": "none"}})
    dump_config(config, tmp_path / "out.yaml")
    assert load_config(tmp_path / "out.yaml").algorithm.kl_coef == 0


def test_dump_into_an_unwritable_place_says_so(base: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        dump_config(load_config(base), base / "below-a-file" / "out.yaml")


def test_build_config_names_its_source() -> None:
    with pytest.raises(ConfigError, match=r"^notebook has 3 problems"):
        build_config({}, source="notebook")


def test_repr_of_a_config_masks_the_password(base: Path) -> None:
    config = load_config(base, ["redis.url=redis://u:hunter2@h:1/0"])
    assert "hunter2" not in repr(config)
    assert "hunter2" not in str(config.redis)
    assert "redis://u:***@h:1/0" in repr(RedisSection(url="redis://u:hunter2@h:1/0"))


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("redis://:pw@h:6379/0", "redis://:***@h:6379/0"),
        ("redis://user:p@ss:word@h/0", "redis://user:***@h/0"),
        ("rediss://token@h", "rediss://***@h"),
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("cannot reach redis://u:pw@h:1, retry", "cannot reach redis://u:***@h:1, retry"),
        ("redis://h/0?password=pw&db=1", "redis://h/0?password=***&db=1"),
        ("rediss://h/0?db=1&ssl_password=pw", "rediss://h/0?db=1&ssl_password=***"),
        ("mail me@example.org", "mail me@example.org"),
        ("", ""),
    ],
)
def test_mask_url_hides_only_secrets(text: str, masked: str) -> None:
    assert mask_url(text) == masked
    assert public_mask_url is mask_url


CHOSEN = {
    "grpo": ("estimator=grpo", "loss_aggregation=seq_mean_token_mean", "kl_in=loss"),
    "dr_grpo": ("estimator=dr_grpo", "loss_aggregation=seq_mean_token_sum_norm"),
    "dapo": ("estimator=grpo", "clip_high=0.28", "mask_truncated=true", "kl_in=none"),
    "gspo": ("estimator=grpo", "policy_loss=gspo", "clip_low=3.0e-4", "clip_high=4.0e-4", "loss_aggregation=seq_mean_token_mean"),
    "cispo": ("estimator=grpo", "policy_loss=cispo", "clip_low=1.0"),
    "rloo": ("estimator=rloo",),
    "reinforce_pp": ("estimator=reinforce_pp",),
    "reinforce_pp_baseline": ("estimator=reinforce_pp_baseline",),
    "remax": ("estimator=remax",),
}
"""The rows of docs/algorithms.md."""


@pytest.mark.parametrize("name", CHOSEN)
def test_preset_gives_way_to_a_chosen_algorithm(name: str) -> None:
    preset = Path(__file__).parents[3] / "configs" / "arithmetic.yaml"
    overrides = [f"algorithm.{setting}" for setting in CHOSEN[name]]
    config = load_preset(preset, overrides)
    assert config.algorithm.estimator == CHOSEN[name][0].partition("=")[2]
    assert not config.algorithm.has_critic
    with pytest.raises(ConfigError, match="critic"):
        load_config(preset, overrides)
    with pytest.raises(ConfigError, match=r"algorithm\.lam is 0\.5"):
        load_preset(preset, [*overrides, "algorithm.lam=0.5"])
