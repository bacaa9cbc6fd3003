"""Compute profiles: what is measured is kept, what lies between is sane, what is wrong is said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.model.errors import InvalidRequest
from quire.model.profile import ComputeProfile, Profiles, Sample, load_profile, ttft_s


def _shipped() -> ComputeProfile:
    profile = Profiles().find("meta-llama/Llama-3.1-8B", "A100-80GB")
    assert profile is not None
    return profile


def test_the_shipped_profile_is_table_a8() -> None:
    """Total prefill milliseconds by context and hit rate, as the paper prints them."""
    table = {
        (4, 0.5): 185.31,
        (4, 0.875): 63.47,
        (16, 0.5): 955.89,
        (16, 0.875): 281.76,
        (32, 0.5): 2589.25,
        (32, 0.875): 763.19,
        (64, 0.5): 8672.79,
        (64, 0.875): 2423.90,
    }
    profile = _shipped()
    assert "Table A8" in profile.source
    for (kilo, hit), total_ms in table.items():
        context = kilo * 1024
        assert profile.prefill_s(context * (1 - hit), context * hit) * 1e3 == pytest.approx(total_ms, rel=1e-6)
        assert profile.window_s(context * (1 - hit), context * hit) * 32e3 == pytest.approx(total_ms, rel=1e-6)


def test_a_sample_that_is_left_out_is_predicted() -> None:
    """Each of the eight from the other seven, within 8%."""
    profile = _shipped()
    for at, sample in enumerate(profile.samples):
        others = ComputeProfile("m", "d", 32, "", profile.samples[:at] + profile.samples[at + 1 :])
        predicted = float(others.prefill_s(sample.input_tokens, sample.prefix_tokens))
        assert predicted == pytest.approx(sample.seconds, rel=0.08)


@given(st.integers(1, 200_000), st.integers(0, 200_000))
def test_predictions_are_positive_and_finite(inputs: int, prefix: int) -> None:
    seconds = float(_shipped().prefill_s(inputs, prefix))
    assert 0 < seconds < 10_000
    assert float(_shipped().prefill_s(0, prefix)) == 0


def test_more_input_takes_longer_where_it_was_measured() -> None:
    profile = _shipped()
    lengths = np.geomspace(512, 32_768, 100)
    for prefix in (2048, 8192, 32_768):
        assert np.all(np.diff(profile.prefill_s(lengths, np.full(100, prefix))) > 0)


def test_profiles_of_ones_own(tmp_path: Path) -> None:
    """Saved, found without regard to case or organisation, and preferred to those that come with Quire."""
    samples = (Sample(16, 0, 0.1), Sample(32, 0, 0.2))
    ComputeProfile("me/Llama-3.1-8B", "A100-80GB", 4, "mine", samples).save(tmp_path / "mine.json")
    profiles = Profiles(tmp_path)
    found = profiles.find("llama-3.1-8b", "a100-80gb")
    assert found is not None
    assert found.source == "mine"
    assert found.samples == samples
    assert profiles.find("llama-3.1-8b", "abacus") is None
    assert len(profiles.all()) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 0},
        {"samples": []},
        {"samples": [{"input_tokens": 1, "prefix_tokens": 0, "seconds": 1}]},
        {"samples": [{"input_tokens": 0, "prefix_tokens": 0, "seconds": 1}] * 2},
        {"samples": [{"input_tokens": 1, "prefix_tokens": 0, "seconds": 0}] * 2},
        {"samples": [{"input_tokens": 1, "seconds": 1}] * 2},
        {"samples": None},
        {"surprise": 1},
    ],
)
def test_files_that_are_no_profile(tmp_path: Path, change: dict[str, object]) -> None:
    good = {
        "model": "m",
        "device": "d",
        "num_layers": 2,
        "source": "s",
        "samples": [{"input_tokens": n, "prefix_tokens": 0, "seconds": 0.1 * n} for n in (1, 2)],
    }
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(good))
    assert load_profile(file).num_layers == 2
    file.write_text(json.dumps(good | change))
    with pytest.raises(InvalidRequest):
        load_profile(file)
    file.write_text("not json")
    with pytest.raises(InvalidRequest, match=r"profile.json"):
        load_profile(file)
    with pytest.raises(InvalidRequest):
        load_profile(tmp_path / "nothing.json")


def test_equation_3() -> None:
    """Transfer below compute: hidden but for the first layer; above: compute is hidden but for the last."""
    assert float(ttft_s(0.01, 0.05, 32)) == pytest.approx(0.01 + 32 * 0.05)
    assert float(ttft_s(0.05, 0.01, 32)) == pytest.approx(32 * 0.05 + 0.01)
    assert float(ttft_s(0.0, 0.01, 1)) == pytest.approx(0.01)
