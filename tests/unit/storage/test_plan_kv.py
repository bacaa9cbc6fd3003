"""What a deployment costs: the parts add up, more cache never hits less, wrong input is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.model.errors import InvalidRequest
from quire.model.profile import Profiles
from quire_tools.plan.kv import PlannedTiers, Prices, TierRates, run

PROFILE = Profiles().find("Llama-3.1-8B", "a100-80gb")
PRICES, RATES = Prices(5.0, 4.0, 0.1, 0.02), TierRates(12.5, 10.0, 2.0)
BYTES, BLOCK = 131_072, 512


def _trace(tmp_path: Path, times: bool = True) -> Path:
    """Two prompts of twenty blocks that share the first ten, twenty times."""
    file = tmp_path / "trace.jsonl"
    lines = []
    for turn in range(20):
        own = range(10, 20) if turn % 2 else range(20, 30)
        record = {"timestamp": turn * 1000 * times, "input_length": 20 * BLOCK, "hash_ids": [*range(10), *own]}
        lines.append(json.dumps(record))
    file.write_text("\n".join(lines))
    return file


def test_parts_add_up_and_more_cache_hits_more(tmp_path: Path) -> None:
    assert PROFILE is not None
    tiers = [
        PlannedTiers(0, 0),
        PlannedTiers(0.7, 0),
        PlannedTiers(10, 0),
        PlannedTiers(0.7, 10),
        PlannedTiers(0.7, 0.7, in_s3=True),
    ]
    report = run(_trace(tmp_path), tiers, PRICES, RATES, PROFILE, BYTES, BLOCK)
    rows = [row.measured for row in report.rows]
    for row in rows:
        assert row["$ per 1M tokens"] == pytest.approx(row["GPU $"] + row["DRAM $"] + row["NVMe $"] + row["S3 $"])
    assert rows[0]["hit rate"] == 0
    assert report.rows[0].ratio == pytest.approx(1.0)
    assert rows[1]["hit rate"] == pytest.approx(0.475), "ten shared blocks of twenty, in all but the first"
    everything = (190 + 180) / 400  # the shared ten in all but the first, the own ten in all but two
    assert rows[2]["hit rate"] == pytest.approx(everything, abs=0.01)
    assert rows[3]["hit rate"] == pytest.approx(everything, abs=0.01)
    assert rows[4]["hit rate"] == pytest.approx(everything, abs=0.01)
    assert rows[4]["GPU stalled, %"] > rows[3]["GPU stalled, %"], "S3 is slower"


def test_what_cannot_be_planned(tmp_path: Path) -> None:
    assert PROFILE is not None
    with pytest.raises(InvalidRequest, match="times"):
        run(_trace(tmp_path, times=False), [PlannedTiers(0, 0)], PRICES, RATES, PROFILE, BYTES, BLOCK)
    with pytest.raises(InvalidRequest, match="bytes_per_token"):
        run(_trace(tmp_path), [PlannedTiers(0, 0)], PRICES, RATES, PROFILE, 0, BLOCK)
    with pytest.raises(InvalidRequest, match="gpu_hour"):
        Prices(-1, 0, 0, 0)
    with pytest.raises(InvalidRequest):
        run(tmp_path / "nothing", [PlannedTiers(0, 0)], PRICES, RATES, PROFILE, BYTES, BLOCK)
