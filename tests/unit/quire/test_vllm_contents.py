"""Names of what vLLM's block hashes name by a client's word: adapters, and images by identifiers."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.integrations.vllm import contents
from quire.integrations.vllm.contents import ContentNames, ModelContents, RequestAdapter, Unnamed

BLOCK = 16


@dataclass
class _Lora:
    lora_path: str
    lora_name: str = "legal"
    lora_int_id: int = 1
    load_inplace: bool = False


@dataclass
class _Request:
    lora_request: _Lora | None = None
    mm_features: list[Any] = field(default_factory=list)


def _image(identifier: str, pixels: torch.Tensor | None, offset: int = 0) -> Any:
    item = None
    if pixels is not None:
        item = {"pixel_values": SimpleNamespace(data=pixels, field=object()), "sizes": _element([(2, 2)])}
    return SimpleNamespace(identifier=identifier, data=item, mm_position=SimpleNamespace(offset=offset, length=BLOCK))


def _element(data: Any) -> Any:
    return SimpleNamespace(data=data, field=object())


def _names(**settings: Any) -> ContentNames:
    return ContentNames(**{"media_max": 100, "media_readable": True, "since_ns": time.time_ns(), **settings})


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\1" * 4096)
    return tmp_path


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\2" * 4096),
        lambda folder: (folder / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 32}'),
    ],
    ids=["weights", "configuration"],
)
def test_an_adapter_is_named_by_its_files(adapter: Path, change: Callable[[Path], Any]) -> None:
    request = _Request(_Lora(str(adapter)))
    names = _names()
    contents = names.of(request)
    first = contents.adapter
    assert first and names.of(request).adapter == first == _names().of(request).adapter
    assert names.is_current(request, contents)
    time.sleep(0.02)
    change(adapter)
    assert not names.is_current(request, contents), "the engine may compute with either"
    with pytest.raises(Unnamed, match="changed after the engine's start"):
        names.of(request)
    assert _names().of(request).adapter not in ("", first)


def test_an_adapter_that_came_after_the_engine_has_no_name(adapter: Path) -> None:
    """A worker may have loaded what its files were before that."""
    names = _names()
    time.sleep(0.02)
    (adapter / "adapter_model.safetensors").write_bytes(b"\3" * 4096)
    with pytest.raises(Unnamed):
        names.of(_Request(_Lora(str(adapter))))


@pytest.mark.parametrize("lora", [_Lora("org/adapter"), _Lora("/nowhere")])
def test_adapters_without_files_have_no_names(lora: _Lora) -> None:
    with pytest.raises(Unnamed):
        _names().of(_Request(lora))


def test_an_adapter_that_is_loaded_in_place_has_no_name(adapter: Path) -> None:
    with pytest.raises(Unnamed):
        _names().of(_Request(_Lora(str(adapter), load_inplace=True)))


def test_one_number_of_two_adapters_has_no_name(adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("other")
    (folder / "adapter_model.bin").write_bytes(b"\4" * 64)
    names = _names()
    first = names.of(_Request(_Lora(str(adapter))))
    with pytest.raises(Unnamed, match="another's"):
        names.of(_Request(_Lora(str(folder))))
    assert not names.is_current(_Request(_Lora(str(folder))), first)
    assert not names.is_current(_Request(_Lora(str(adapter))), first), "the worker may have either by now"
    with pytest.raises(Unnamed):
        names.of(_Request(_Lora(str(adapter))))


def test_a_running_request_of_an_adapter_that_is_loaded_in_place_has_no_name_any_more(adapter: Path) -> None:
    names, request = _names(), _Request(_Lora(str(adapter)))
    contents = names.of(request)
    with pytest.raises(Unnamed):
        names.of(_Request(_Lora(str(adapter), load_inplace=True)))
    assert not names.is_current(request, contents)


def test_another_folder_in_place_of_an_adapters_is_another_adapter(adapter: Path, tmp_path: Path) -> None:
    """All of its files are old: only the link to them is new."""
    versions = tmp_path / "versions"
    for number in (1, 2):
        (versions / str(number)).mkdir(parents=True)
        (versions / str(number) / "adapter_model.safetensors").write_bytes(bytes([number]) * 64)
    link = tmp_path / "current"
    link.symlink_to(versions / "1")
    names, request = _names(), _Request(_Lora(str(link)))
    contents = names.of(request)
    time.sleep(0.02)
    link.unlink()
    link.symlink_to(versions / "2")
    assert not names.is_current(request, contents)
    fresh, late = _names(since_ns=time.time_ns() - 10**9), _Request(_Lora(str(link), lora_int_id=2))
    with pytest.raises(Unnamed, match="after the engine's start"):
        fresh.of(late)


def test_a_folder_that_cannot_be_read_costs_its_requests_their_names(adapter: Path) -> None:
    """A file server may be away, and vLLM's scheduler reads the metadata in each step."""
    names, request = _names(), _Request(_Lora(str(adapter)))
    contents = names.of(request)
    request.lora_request = _Lora(str(adapter / "adapter_config.json" / "below"))
    assert not names.is_current(request, contents)


def test_images_are_named_by_what_the_model_is_given() -> None:
    """A processor that was changed gives other pixels; an identifier that is used again names others."""
    pixels = torch.arange(12, dtype=torch.float32)
    hashes = [bytes([number]) * 32 for number in range(4)]
    image = _Request(mm_features=[_image("cat", pixels, offset=BLOCK + 3)])
    first = _names().of(image).fold(hashes, 0, BLOCK)
    assert first[0] == hashes[0], "text before the image is shared"
    assert all(folded != block for folded, block in zip(first[1:], hashes[1:], strict=True))
    assert _names().of(image).fold(hashes[2:], 2, BLOCK) == first[2:]
    for tensor in (pixels + 1, pixels.to(torch.bfloat16), pixels.reshape(3, 4)):
        changed = _names().of(_Request(mm_features=[_image("cat", tensor, offset=BLOCK + 3)]))
        assert changed.fold(hashes, 0, BLOCK)[0] == hashes[0]
        assert not set(changed.fold(hashes, 0, BLOCK)[1:]) & set(first)


def test_a_later_image_names_no_block_before_it() -> None:
    pixels = torch.zeros(4)
    hashes = [bytes([number]) * 32 for number in range(4)]
    features = [_image("a", pixels, 0), _image("b", pixels + 1, 2 * BLOCK)]
    single, pair = (_names().of(_Request(mm_features=features[:count])).fold(hashes, 0, BLOCK) for count in (1, 2))
    assert single[:2] == pair[:2] and not set(single[2:]) & set(pair[2:])
    swapped = _names().of(_Request(mm_features=[_image("a", pixels + 1, 0), _image("b", pixels, 2 * BLOCK)]))
    assert not set(swapped.fold(hashes, 0, BLOCK)) & set(pair)


def test_an_identifier_that_is_used_again_has_no_name() -> None:
    """vLLM may still hold the encoded first image."""
    names = _names()
    first = _Request(mm_features=[_image("picture", torch.zeros(4), 2 * BLOCK)])
    second = _Request(mm_features=[_image("other", torch.ones(4), 0), _image("picture", torch.ones(4), 2 * BLOCK)])
    assert names.of(first).blocks_max(first, BLOCK) > 2
    named = names.of(first)
    assert names.is_current(first, named)
    contents = names.of(second)
    assert contents.blocks_max(second, BLOCK) == 2, "what comes before the image"
    assert not names.is_current(first, named), "vLLM may compute with the other image by now"
    assert names.of(first).blocks_max(first, BLOCK) == 2


def test_an_image_behind_one_without_a_name_counts() -> None:
    """vLLM caches its encoding."""
    names = _names()
    names.of(_Request(mm_features=[_image("stripped", None, 0), _image("picture", torch.zeros(4), BLOCK)]))
    later = _Request(mm_features=[_image("picture", torch.ones(4), BLOCK)])
    assert names.of(later).blocks_max(later, BLOCK) == 1


def test_images_of_a_request_that_was_not_named_in_time_have_no_names() -> None:
    names, late = _names(), _Request(mm_features=[_image("picture", torch.zeros(4), BLOCK)])
    names.distrust(late)
    assert names.of(late).blocks_max(late, BLOCK) == 1
    second = _Request(mm_features=[_image("picture", torch.ones(4), BLOCK)])
    assert names.of(second).blocks_max(second, BLOCK) == 1


def test_data_that_is_elsewhere_has_no_name() -> None:
    request = _Request(mm_features=[_image("picture", None, BLOCK)])
    assert _names().of(request).blocks_max(request, BLOCK) == 1
    local = _Request(mm_features=[_image("picture", torch.zeros(4), BLOCK)])
    assert _names(media_readable=False).of(local).blocks_max(local, BLOCK) == 1
    foreign = _Request(mm_features=[_image("picture", torch.zeros(4), BLOCK)])
    foreign.mm_features[0].data["handle"] = _element(object())
    assert _names().of(foreign).blocks_max(foreign, BLOCK) == 1


def test_an_image_that_came_later_has_no_name() -> None:
    """Requests that are streamed grow."""
    request = _Request(mm_features=[_image("a", torch.zeros(4), 0)])
    names = _names()
    contents = names.of(request)
    request.mm_features.append(_image("b", torch.zeros(4), 3 * BLOCK))
    assert names.is_current(request, contents), "of its first image nothing has changed"
    second = _Request(mm_features=[_image("b", torch.ones(4), BLOCK)])
    assert names.of(second).blocks_max(second, BLOCK) == 1, "vLLM has the other one"
    assert contents.blocks_max(request, BLOCK) == 3
    assert ModelContents().blocks_max(request, BLOCK) == 0


def test_images_are_forgotten_in_time() -> None:
    names = _names(media_max=2)
    for number in range(5):
        names.of(_Request(mm_features=[_image(str(number), torch.zeros(4))]))
    second = _Request(mm_features=[_image("0", torch.ones(4))])
    assert names.of(second).blocks_max(second, BLOCK) > 0


def test_a_tier_waits_for_an_adapters_name_and_loses_it_with_the_files(adapter: Path) -> None:
    names, naming = _names(), Future[str]()
    lora = _Lora(str(adapter))
    named = RequestAdapter(names, lora, naming)
    assert named.name() is None is named.current_name()
    naming.set_result(names.adapter(lora))
    assert named.current_name() == named.name() == bytes.fromhex(names.adapter(lora))
    time.sleep(0.02)
    (adapter / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 32}')
    with pytest.raises(Unnamed, match="files have changed"):
        named.current_name()


def test_a_tier_does_not_wait_for_ever_for_an_adapters_name(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "_DIGESTED_S", 0.0)
    with pytest.raises(Unnamed, match="took more than"):
        RequestAdapter(_names(), _Lora(str(adapter)), Future()).name()


@pytest.mark.parametrize("error", [OSError("no such file"), Unnamed("changed")])
def test_an_adapter_that_cannot_be_read_has_no_name(adapter: Path, error: Exception) -> None:
    naming = Future[str]()
    naming.set_exception(error)
    with pytest.raises(Unnamed, match=str(error)):
        RequestAdapter(_names(), _Lora(str(adapter)), naming).name()
