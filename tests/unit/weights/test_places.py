"""Hosts, and the choice of a transport for a pair."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import ConfigError, TransportError
from shoal.types.weights import Place, SinkWorkerLayout
from shoal.weights.places import choose_transport, host_id

EVERYTHING = ("shm", "grpc", "collective", "cuda_ipc")


def worker_at(host: str, device: str, *offered: str) -> SinkWorkerLayout:
    place = Place(host_id=host, device=device)
    endpoints = dict.fromkeys(offered, "somewhere")
    return SinkWorkerLayout(worker_rank=0, parameters=(), regions=(), staging_bytes=0, place=place, endpoints=endpoints)


@pytest.mark.parametrize(
    ("rank_at", "worker", "chosen"),
    [
        (("a", "cuda"), worker_at("a", "cuda", *EVERYTHING), "cuda_ipc"),
        (("a", "cuda"), worker_at("b", "cuda", *EVERYTHING), "collective"),
        (("a", "cuda"), worker_at("a", "cuda", "shm", "collective"), "collective"),
        (("a", "cuda"), worker_at("a", "cuda", "shm", "grpc"), "shm"),
        (("a", "cuda"), worker_at("a", "cpu", *EVERYTHING), "shm"),
        (("a", "cpu"), worker_at("a", "cuda", *EVERYTHING), "shm"),
        (("a", "cpu"), worker_at("a", "cpu", *EVERYTHING), "shm"),
        (("a", "cpu"), worker_at("b", "cpu", *EVERYTHING), "grpc"),
        (("a", "cuda"), worker_at("b", "cpu", *EVERYTHING), "grpc"),
        (("a", "cuda"), worker_at("b", "cuda", "grpc", "shm"), "grpc"),
    ],
)
def test_auto_takes_the_shortest_way_that_is_offered(rank_at: tuple[str, str], worker: SinkWorkerLayout, chosen: str) -> None:
    assert choose_transport("auto", Place(host_id=rank_at[0], device=rank_at[1]), worker) == chosen


def test_auto_says_what_is_offered_when_nothing_connects() -> None:
    with pytest.raises(TransportError, match=r"rank on cpu of host a with worker 0 on cpu of host b; offered: collective, shm"):
        choose_transport("auto", Place(host_id="a", device="cpu"), worker_at("b", "cpu", "shm", "collective"))
    with pytest.raises(TransportError, match=r"offered: cuda_ipc; a worker on a GPU offers shm and grpc only if push\.transport says so"):
        choose_transport("auto", Place(host_id="a", device="cpu"), worker_at("a", "cuda", "cuda_ipc"))
    with pytest.raises(TransportError, match="offered: nothing"):
        choose_transport("auto", Place(host_id="a", device="cpu"), worker_at("a", "cpu"))


@pytest.mark.parametrize(
    ("setting", "rank_at"), [("shm", "a cpu"), ("grpc", "b cpu"), ("collective", "b cuda"), ("cuda_ipc", "a cuda"), ("grpc", "a cuda")]
)
def test_a_setting_overrides(setting: str, rank_at: str) -> None:
    host, device = rank_at.split()
    assert choose_transport(setting, Place(host_id=host, device=device), worker_at("a", device, *EVERYTHING)) == setting


@pytest.mark.parametrize(
    ("setting", "rank_at", "worker", "words"),
    [
        ("grpc", "a cpu", worker_at("a", "cpu", "shm"), "it is not offered; offered: shm; set push.transport to auto"),
        ("shm", "b cpu", worker_at("a", "cpu", "shm"), "it needs one host, but the rank is on b"),
        ("cuda_ipc", "a cpu", worker_at("a", "cuda", "cuda_ipc"), "it needs cuda on both sides"),
        ("collective", "a cpu", worker_at("a", "cuda", "collective"), "it needs the same device on both sides"),
    ],
)
def test_a_setting_that_does_not_connect_is_refused(setting: str, rank_at: str, worker: SinkWorkerLayout, words: str) -> None:
    host, device = rank_at.split()
    with pytest.raises(TransportError, match=words):
        choose_transport(setting, Place(host_id=host, device=device), worker)


def test_host_id_tells_staging_folders_apart(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    assert host_id(str(one)) == host_id(str(one))
    assert host_id(str(one)) != host_id(str(other))


def test_host_id_wants_an_existing_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"push\.shm_dir"):
        host_id(str(tmp_path / "absent"))
