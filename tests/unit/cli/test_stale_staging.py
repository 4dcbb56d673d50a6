"""Which staging files a new run removes: those that no process holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.local.stale import remove_stale_staging
from shoal.weights.staging_names import server_staging, worker_staging
from shoal.weights.transports.shm import ShmStaging

NAME = worker_staging(server_staging("run", "rollout-0", 17), 0, 1)


def test_staging_that_a_worker_holds_stays_and_goes_with_it(tmp_path: Path) -> None:
    sink = ShmStaging(str(tmp_path), NAME, 16)
    assert remove_stale_staging(str(tmp_path)) == []
    assert Path(sink.endpoint[1]).exists()
    sink.close()
    assert list(tmp_path.iterdir()) == []


def test_staging_of_a_killed_worker_is_removed(tmp_path: Path) -> None:
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    path = tmp_path / f"shoal-{NAME}"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert remove_stale_staging(str(tmp_path)) == []
        holder.kill()
    assert remove_stale_staging(str(tmp_path)) == [path.name]
    assert not path.exists()


@pytest.mark.parametrize("name", ["notes", "shoal-notes.txt", f"other-{NAME}", f"shoal-{NAME}.bak"])
def test_other_names_stay(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert remove_stale_staging(str(tmp_path)) == []
    assert (tmp_path / name).exists()


def test_links_and_folders_with_a_staging_name_stay(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.touch()
    (tmp_path / f"shoal-{NAME}").symlink_to(target)
    (tmp_path / f"shoal-{NAME}1").mkdir()
    assert remove_stale_staging(str(tmp_path)) == []
    assert len(list(tmp_path.iterdir())) == 3


def test_folder_that_does_not_exist_has_nothing_stale(tmp_path: Path) -> None:
    assert remove_stale_staging(str(tmp_path / "none")) == []
