"""Copies of a GPU's arrays by another thread: behind the work of the stream that is the caller's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from quire.client.kv_arrays import on_current_streams


def test_another_thread_works_on_the_callers_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's current stream is a thread's: a copy on another one would not wait for the kernels before it."""
    own, entered = threading.local(), list[str]()
    own.stream = "the caller's"
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: f"{getattr(own, 'stream', 'the default')} on {device}"
    )

    @contextmanager
    def stream(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    monkeypatch.setattr(torch.cuda, "stream", stream)
    planes = [SimpleNamespace(is_cuda=True, device=f"cuda:{number % 2}") for number in range(4)]
    in_order = on_current_streams([planes[:2], tuple(planes[2:])])

    def copy() -> None:
        with in_order():
            entered.append("copies")

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join(10)
    assert sorted(entered[:2]) == ["the caller's on cuda:0", "the caller's on cuda:1"] and entered[2:] == ["copies"]


def test_arrays_of_the_host_have_no_stream() -> None:
    assert on_current_streams([(torch.zeros(2), torch.zeros(2)), None]) is nullcontext
