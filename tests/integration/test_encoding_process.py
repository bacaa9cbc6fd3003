"""The process that encodes large images: the same bytes as in a thread, within its bounds, and gone when killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from quire.model.errors import DeadlineExceeded, InvalidRequest, ResourceExhausted
from quire.model.fitting import Fit, Gravity
from quire.model.images import Rendering
from quire_decoder.adapters.encoding import ImagecodecsEncoder
from quire_decoder.adapters.encoding_process import EncodingProcess

RENDERINGS = [
    Rendering("png"),
    Rendering("jpeg", 80, width=300),
    Rendering("webp", 70, 200, 200, Fit.COVER, Gravity.NORTH),
    Rendering("avif", 60, height=100),
    Rendering("png", width=900, enlarge=True),
]


@pytest.fixture
def process() -> Iterator[EncodingProcess]:
    process = EncodingProcess(1 << 30, 60.0)
    yield process
    process.kill()


def _noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_the_same_bytes_as_in_a_thread(process: EncodingProcess) -> None:
    pixels, here = _noise(400, 600), ImagecodecsEncoder()
    lossless = here.encode(pixels, Rendering("png"))
    for rendering in RENDERINGS:
        expected = here.encode(pixels, rendering)
        assert process.run(pixels, rendering) == expected
        assert process.run(lossless, rendering) == expected, "of the file that caches keep"
    with pytest.raises(InvalidRequest, match="webp cannot hold"):
        process.run(_noise(16384, 4), Rendering("webp"))
    assert process.usable


def test_its_memory_is_bounded() -> None:
    """More than that is refused; the process, or its successor, goes on."""
    process, large = EncodingProcess(64 << 20, 60.0), Rendering("avif", 80, 4000, 4000, enlarge=True)
    with pytest.raises(InvalidRequest, match="ENCODE_BYTES"):
        process.run(_noise(64, 64), large)
    if not process.usable:
        process = EncodingProcess(64 << 20, 60.0)
    assert process.run(_noise(64, 64), Rendering("png"))
    process.kill()


def test_its_time_is_bounded() -> None:
    process = EncodingProcess(1 << 31, 0.2)
    with pytest.raises(DeadlineExceeded, match="ENCODE_TIMEOUT_S"):
        process.run(_noise(64, 64), Rendering("webp", 0, 8000, 8000, enlarge=True))
    assert not process.usable


def test_killed_in_the_middle(process: EncodingProcess) -> None:
    """It ends at once: what it was at would take many times longer."""
    failed: list[Exception] = []

    def encode() -> None:
        try:
            process.run(_noise(64, 64), Rendering("webp", 0, 8000, 8000, enlarge=True))
        except ResourceExhausted as error:
            failed.append(error)

    process.run(_noise(64, 64), Rendering("png"))  # it has started
    thread = threading.Thread(target=encode)
    thread.start()
    time.sleep(0.3)
    process.kill()
    thread.join(10)
    assert not thread.is_alive() and len(failed) == 1
    assert not process.usable
    with pytest.raises(ResourceExhausted):
        process.run(_noise(64, 64), Rendering("png"))
    process.kill()  # once more does no harm
