"""Memory of large reads: it is used again, never more than was needed at once, and it is ordinary memory to a user."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthmix import ops
from depthmix.ops.attend import native
from depthmix.ops.attend.native.pool import SMALLEST, sizes
from depthmix.ops.memory import LiveBytes

pytestmark = pytest.mark.skipif(
    native.library() is None or not os.path.exists("/proc/self"), reason="needs the native backend on Linux"
)
TOKENS, DIM = 256, 1024  # 1 MiB in float32, the smallest that the pool serves


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    gc.collect()
    ops.empty_cache()
    yield
    ops.empty_cache()


def held() -> tuple[int, int]:
    return sizes(native.library())


def leaves(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(DIM,), (DIM,), *[(TOKENS, DIM)] * count]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def gradients(found: list[Tensor]) -> list[Tensor]:
    query, weight, *sources = found
    with ops.using("native"):
        h, _ = ops.attend(sources, query, weight)
    return list(torch.autograd.grad(h, found, torch.ones_like(h)))


def test_the_gradients_of_the_next_read_lie_where_those_of_the_last_one_lay() -> None:
    found = leaves()
    first = gradients(found)
    places = {g.data_ptr() for g in first[2:]}
    assert held() == (3 * SMALLEST, SMALLEST)  # the mixture waits
    del first
    assert held() == (0, 4 * SMALLEST)
    second = gradients(found)
    assert len({g.data_ptr() for g in second[2:]} & places) >= 2  # one of the three may take the mixture's place
    assert sum(held()) == 4 * SMALLEST


def test_a_read_in_used_memory_is_right() -> None:
    found = [leaf.detach().double().requires_grad_() for leaf in leaves()]
    for _ in range(3):
        ours = gradients(found)
        query, weight, *sources = found
        with ops.using("reference"):
            h, _ = ops.attend(sources, query, weight)
        plain = torch.autograd.grad(h, found, torch.ones_like(h))
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_memory_in_use_is_never_given_twice() -> None:
    found = leaves()
    kept = gradients(found)
    copies = [g.clone() for g in kept]
    gradients([(2 * t.detach()).requires_grad_() for t in found])
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_a_part_of_a_tensor_keeps_its_memory() -> None:
    part = gradients(leaves())[2][3:5]
    copy = part.clone()
    gradients(leaves())
    assert torch.equal(part, copy)
    assert held()[0] == SMALLEST


def test_a_mixture_can_be_changed_in_place() -> None:
    query, weight, *sources = leaves()
    with ops.using("native"):
        h, _ = ops.attend(sources, query, weight)
    h.mul_(2).add_(1)
    h.sum().backward()
    assert sources[0].grad is not None


def test_small_tensors_and_other_devices_stay_with_torch() -> None:
    assert native.empty_like(torch.empty(TOKENS - 1, DIM)).shape == (TOKENS - 1, DIM)
    assert held() == (0, 0)


def test_shapes_with_many_axes_fall_back_to_torch() -> None:
    deep = torch.empty(*[1] * 10, TOKENS, DIM)
    assert native.empty_like(deep).shape == deep.shape
    assert held() == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_comes_is_an_ordinary_contiguous_tensor(dtype: torch.dtype) -> None:
    like = torch.empty(2, TOKENS, DIM, dtype=dtype)
    made = native.empty_like(like)
    assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), dtype)
    assert not made.requires_grad
    assert not made._is_view()
    made.copy_(torch.arange(like.numel(), dtype=dtype).view_as(like))
    assert made[1, -1, -1] == like.numel() - 1


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=24))
@settings(deadline=None, max_examples=50)
def test_used_and_waiting_together_never_exceed_what_was_in_use_at_once(steps: list[tuple[int, bool]]) -> None:
    ops.empty_cache()
    alive: list[Tensor] = []
    most = 0
    for pages, drop in steps:
        alive.append(native.empty_like(torch.empty(pages * TOKENS, DIM, device="cpu")))
        most = max(most, held()[0])
        assert sum(held()) <= most
        assert held()[0] == sum(t.numel() * t.element_size() for t in alive)
        if drop:
            del alive[: len(alive) // 2 + 1]
            assert sum(held()) <= most


def test_what_waits_is_handed_back_on_request() -> None:
    gradients(leaves())
    gc.collect()
    assert held()[1] > 0
    ops.empty_cache()
    assert held() == (0, 0)


def test_threads_take_and_give_at_once() -> None:
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(50):
            mine = native.empty_like(torch.empty(TOKENS, DIM))
            mine.fill_(mark)
            if not (mine == mark).all():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert held()[0] == 0


def test_a_forked_child_may_read() -> None:
    gradients(leaves())
    pid = os.fork()
    if pid == 0:
        mine = native.empty_like(torch.empty(TOKENS, DIM))
        mine[0, 0] = 1.0
        os._exit(int(mine[0, 0].item() != 1.0))
    assert os.waitpid(pid, 0)[1] == 0


def test_a_mode_that_counts_memory_sees_large_mixtures() -> None:
    sources = [torch.randn(2048, 256) for _ in range(3)]
    with torch.no_grad(), LiveBytes() as live:
        h, _ = ops.attend(sources, torch.zeros(256))
        assert live.now >= h.nbytes
    assert h.nbytes > SMALLEST
