"""Which files a scorer's fingerprint covers, and that it does not depend on the place."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.fingerprint import fingerprint_of

FILES = {
    "alone.py": "import json\nimport beside\nfrom kit import part\ndef score(prompt, response, row):\n    return 1.0\n",
    "beside.py": "import further\n",
    "further.py": "VALUE = 1\n",
    "stranger.py": "VALUE = 1\n",
    "kit/__init__.py": "",
    "kit/part.py": "VALUE = 1\n",
    "kit/other.py": "VALUE = 1\n",
    "pack/__init__.py": "SIZE = 1\n",
    "pack/inner/__init__.py": "",
    "pack/inner/scorer.py": "import further\ndef score(prompt, response, row):\n    from .. import late\n    return 1.0\n",
    "pack/late.py": "from pack.deep.leaf import VALUE\n",
    "pack/deep/__init__.py": "",
    "pack/deep/leaf.py": "VALUE = 1\n",
    "pack/unused.py": "VALUE = 1\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / "here" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "here"


def score_of(file: Path) -> Callable[..., object]:
    """Compile a file's function without importing what it imports."""
    text = file.read_text()
    names: dict[str, Callable[..., object]] = {}
    code = compile(text[text.index("def score") :], str(file), "exec")
    exec(code, names)  # noqa: S102 - the test's own text
    return names["score"]


def fingerprint(folder: Path, name: str) -> str:
    return fingerprint_of(score_of(folder / name))


@pytest.mark.parametrize(
    ("name", "changed", "is_covered"),
    [
        ("alone.py", "alone.py", True),
        ("alone.py", "beside.py", True),
        ("alone.py", "further.py", True),
        ("alone.py", "kit/part.py", True),
        ("alone.py", "kit/other.py", False),
        ("alone.py", "stranger.py", False),
        ("pack/inner/scorer.py", "pack/__init__.py", True),
        ("pack/inner/scorer.py", "pack/late.py", True),
        ("pack/inner/scorer.py", "pack/deep/leaf.py", True),
        ("pack/inner/scorer.py", "pack/unused.py", False),
        ("pack/inner/scorer.py", "further.py", False),
    ],
)
def test_fingerprint_covers_what_is_imported(folder: Path, name: str, changed: str, is_covered: bool) -> None:
    before = fingerprint(folder, name)
    with (folder / changed).open("a") as file:
        file.write("# another line\n")
    assert (fingerprint(folder, name) != before) is is_covered


@pytest.mark.parametrize("name", ["alone.py", "pack/inner/scorer.py"])
def test_fingerprint_is_the_same_in_another_place(folder: Path, name: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "there" / "deeper"
    shutil.copytree(folder, elsewhere)
    assert fingerprint(elsewhere, name) == fingerprint(folder, name)


def test_fingerprint_of_a_library_file_is_not_one_of_all_libraries() -> None:
    # A module without a package lies beside every other library.
    found = importlib.util.find_spec("typing_extensions")
    assert found is not None
    assert found.origin is not None
    before = fingerprint_of(importlib.import_module("typing_extensions").deprecated)
    assert len(before) == 16


def test_fingerprint_tells_functions_and_settings_apart() -> None:
    def one() -> None: ...
    def two() -> None: ...

    assert len({fingerprint_of(one), fingerprint_of(two), fingerprint_of(one, "settings")}) == 3
    assert fingerprint_of(one) == fingerprint_of(one)


def test_fingerprint_of_a_function_without_a_file_is_of_its_bytecode() -> None:
    names: dict[str, Callable[..., object]] = {}
    exec("def one(): return 1\ndef other(): return 2", names)  # noqa: S102 - the test's own text
    names["other"].__qualname__ = "one"
    assert fingerprint_of(names["one"]) != fingerprint_of(names["other"])
    assert fingerprint_of(json.JSONEncoder.default)
