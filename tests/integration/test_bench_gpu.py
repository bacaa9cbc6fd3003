"""`quire bench gpu`, as far as a machine without a GPU can run it: `make test-gpu` runs it on one."""

from __future__ import annotations

import pytest

from quire.model.errors import ConfigInvalid, InternalError
from quire_bench.gpu import delivery
from quire_bench.gpu.device import Device
from quire_bench.gpu.gpu import run


def test_every_part_is_measured_and_checked() -> None:
    report = run("cpu", 4, 4, [64], ["eager", "graphs"], 1)
    assert [row.params["part"] for row in report.rows] == ["delivery", "overlap", "logits", "logits", "decode 64"]
    assert any("graphs" in note and "CUDA" in note for note in report.notes), "what was left out is said"


def test_a_wrong_byte_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = delivery.Deliveries.deliver

    def wrong(self: delivery.Deliveries, *arguments: object) -> None:
        deliver(self, *arguments)  # type: ignore[arg-type]
        self._target[5] ^= 1

    monkeypatch.setattr(delivery.Deliveries, "deliver", wrong)
    with pytest.raises(InternalError, match="other bytes"):
        run("cpu", 4, 4, [64], ["eager"], 1)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="abacus"):
        Device("abacus")
