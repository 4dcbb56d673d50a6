"""Parts of tensors: bounded, in order, whole; and copies by one thread or two give the same bytes and digest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.weights.transports.chunks import CHUNK_BYTES, ChunkCopier, as_array, row_chunks


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(0, 9), max_size=4),
    narrow=st.booleans(),
    transposed=st.booleans(),
    chunk_bytes=st.integers(8, 200),
)
def test_row_chunks_are_bounded_ordered_and_whole(shape: list[int], narrow: bool, transposed: bool, chunk_bytes: int) -> None:
    tensor = torch.arange(int(torch.tensor(shape).prod()) if shape else 1, dtype=torch.float64).view(shape)
    if narrow and shape and shape[-1] > 2:
        tensor = tensor[..., 1:-1]
    if transposed and len(shape) > 1:
        tensor = tensor.transpose(0, -1)
    same = tensor.clone()
    chunks = list(row_chunks(tensor, same, chunk_bytes=chunk_bytes))
    joined = torch.cat([chunk.reshape(-1) for chunk, _ in chunks]) if chunks else torch.empty(0)
    assert torch.equal(joined, tensor.reshape(-1).to(joined.dtype))
    assert all(chunk.shape == other.shape and 0 < chunk.nbytes <= chunk_bytes for chunk, other in chunks)
    assert all(torch.equal(chunk, other) for chunk, other in chunks)


def test_row_chunks_share_memory() -> None:
    tensor = torch.zeros(700, 800)[:, 10:700]
    for (chunk,) in row_chunks(tensor):
        chunk.fill_(1)
    assert bool(tensor.all())


@pytest.fixture(params=[1, 2])
def copier(request: pytest.FixtureRequest) -> Iterator[ChunkCopier]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    made = ChunkCopier()
    yield made
    made.close()
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_copies_and_digests_pieces_of_any_size(copier: ChunkCopier, dtype: torch.dtype) -> None:
    sources = [torch.randn(3000, 700), torch.randn(()), torch.randn(0, 5), torch.randn(5 * CHUNK_BYTES // 4), torch.randn(900, 800).T]
    buffers = [torch.zeros(3000, 900, dtype=dtype)[:, 100:800], *(torch.zeros(one.shape, dtype=dtype) for one in sources[1:])]
    digest = copier.write(buffers, sources)
    assert all(torch.equal(target, source.to(dtype)) for target, source in zip(buffers, sources, strict=True))
    expected = xxhash.xxh3_64(b"".join(as_array(target.contiguous()).tobytes() for target in buffers))
    assert digest == expected.intdigest()


def test_second_thread_helps_one_and_keeps_nobody_waiting(copier: ChunkCopier) -> None:
    sources = [torch.randn(4 * CHUNK_BYTES // 4) for _ in range(4)]
    gate = threading.Barrier(4)

    def write(source: Tensor) -> bool:
        target = torch.zeros_like(source)
        gate.wait(30)
        digest = copier.write([target], [source])
        return torch.equal(target, source) and digest == xxhash.xxh3_64(source.numpy().tobytes()).intdigest()

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(write, sources))
