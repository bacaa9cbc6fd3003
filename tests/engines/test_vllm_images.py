"""Real vLLM with a model that sees images: answers are those of the image, whatever was cached under its identifier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip(
    "torchvision", reason="vLLM's vision models need torchvision; PyPI has none for a torch without CUDA"
)
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from quire.integrations.vllm.contents import ContentNames
from quire_tools.local import LocalCluster
from tests.engines.engine import BLOCK, Engine, engine
from tests.polling import until

TEXT = "abcdefgh" * 20
CACHED = (4 + 1 + len(TEXT)) // BLOCK * BLOCK
"""Four tokens of the image, <bos> and a line's end."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PaliGemma of random weights, with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("images")
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 2048}
    config = PaliGemmaConfig(
        text_config={**size, **text, "model_type": "gemma"},
        vision_config={
            **size,
            "model_type": "siglip_vision_model",
            "image_size": 28,
            "patch_size": 14,
            "projection_dim": 64,
        },
        projection_dim=64,
        image_token_index=3,
        architectures=["PaliGemmaForConditionalGeneration"],
    )
    pali = PaliGemmaForConditionalGeneration(config).to(torch.float32)
    with torch.no_grad():
        for weights in pali.parameters():
            if weights.dim() > 1:
                weights.normal_(0, 0.3)
    pali.save_pretrained(folder)
    file = folder / "model.safetensors"  # vLLM has its vision towers' names
    save_file(
        {name.replace("vision_tower.", "vision_tower.vision_model."): part for name, part in load_file(file).items()},
        file,
    )
    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<image>": 3, "<unk>": 4, "\n": 5}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    images = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    images.image_seq_length = 4
    PaliGemmaProcessor(image_processor=images, tokenizer=fast).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def images() -> list[Image.Image]:
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 255, (28, 28, 3), dtype=np.uint8)) for _ in range(2)]


def _answer(quire: Engine, image: Image.Image, name: str | None = None) -> tuple[list[int], int]:
    from vllm import SamplingParams

    prompt: dict[str, Any] = {"prompt": TEXT, "multi_modal_data": {"image": [image]}}
    if name is not None:
        prompt["multi_modal_uuids"] = {"image": [name]}
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (answer,) = quire.llm.generate([prompt], greedy, use_tqdm=False)
    return list(answer.outputs[0].token_ids), answer.num_cached_tokens


@pytest.fixture(scope="module")
def expected(model: Path, images: list[Image.Image]) -> list[list[int]]:
    """Answers of vLLM alone."""
    with engine(model, max_model_len=512) as alone:
        answers = [_answer(alone, image)[0] for image in images]
    assert answers[0] != answers[1], "the image makes a difference here"
    return answers


@pytest.mark.parametrize("name", [None, "picture"])
def test_an_image_gives_its_own_answer(
    model: Path,
    engine_cluster: LocalCluster,
    images: list[Image.Image],
    expected: list[list[int]],
    name: str | None,
) -> None:
    """A client used its name of the first image for the second one, in another engine."""
    gateway = engine_cluster.gateway_address
    with engine(model, gateway, max_model_len=512) as quire:
        assert _answer(quire, images[0], name) == (expected[0], 0)
        until(lambda: quire.figures().get("stored_blocks", 0) > 0, "blocks stored")
    for at, cached in ((0, CACHED), (1, 0), (1, CACHED), (0, CACHED)):
        with engine(model, gateway, max_model_len=512) as quire:
            assert _answer(quire, images[at], name) == (expected[at], cached)
            if not cached:
                until(lambda: quire.figures().get("stored_blocks", 0) > 0, "blocks stored")


def test_a_changed_processor_gives_another_answer(
    model: Path,
    engine_cluster: LocalCluster,
    images: list[Image.Image],
    expected: list[list[int]],
) -> None:
    gateway, file = engine_cluster.gateway_address, model / "processor_config.json"
    with engine(model, gateway, max_model_len=512) as quire:
        assert _answer(quire, images[0]) == (expected[0], 0)
        until(lambda: quire.figures().get("stored_blocks", 0) > 0, "blocks stored")
    original = file.read_text()
    changed = json.loads(original)
    changed["image_processor"]["image_mean"] = [0.1, 0.2, 0.9]
    file.write_text(json.dumps(changed))
    try:
        with engine(model, max_model_len=512) as alone:
            answer = _answer(alone, images[0])[0]
        with engine(model, gateway, max_model_len=512) as quire:
            assert _answer(quire, images[0]) == (answer, 0)
    finally:
        file.write_text(original)


def test_the_fault_put_back_gives_the_answer_of_another_image(
    model: Path,
    engine_cluster: LocalCluster,
    images: list[Image.Image],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An image that is named by its identifier alone."""
    monkeypatch.setattr(ContentNames, "_media_of", _by_identifier)
    gateway = engine_cluster.gateway_address
    with engine(model, gateway, max_model_len=512) as quire:
        assert _answer(quire, images[0], "picture") == (expected[0], 0)
        until(lambda: quire.figures().get("stored_blocks", 0) > 0, "blocks stored")
    with engine(model, gateway, max_model_len=512) as quire:
        answer, cached = _answer(quire, images[1], "picture")
    assert cached == CACHED and answer != expected[1]


def _by_identifier(self: ContentNames, request: Any) -> tuple[Any, Any, int]:
    features = request.mm_features or ()
    return tuple((feature.mm_position.offset, feature.identifier.encode()) for feature in features), (), len(features)
