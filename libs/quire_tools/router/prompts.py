"""Tokens of prompts, by the engines' own tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import tee
from typing import Any, Final

import aiohttp

from quire.model.keys import ChunkKeys
from quire.telemetry import logger
from quire_tools.router.block_names import BlockNaming
from quire_tools.router.engine import RoutedEngine
from quire_tools.router.known_blocks import digests_of
from quire_tools.router.requests import CHAT, COMPLETIONS, GenerationRequest, token_prompt, tokens_of

_COPIED: Final[Mapping[str, Sequence[str]]] = {
    COMPLETIONS: ("model", "prompt", "add_special_tokens"),
    CHAT: (
        "model",
        "messages",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "tools",
    ),
}
_TOKENIZE_S: Final = 1.0
_ASKED: Final = 2
"""Engines, for the tokens of a prompt."""
_CHARACTERS_PER_TOKEN: Final = 4
_TOKENS_AT_ONCE: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt.

    Attributes:
        tokens: Its tokens; empty where they are unknown.
        length: How many there are, estimated where they are unknown.
        adapter: Name of the adapter that it is computed with; empty for none.
        cache_salt: Salt of the names of its blocks; empty for none.
    """

    tokens: Sequence[int]
    length: int
    adapter: str = ""
    cache_salt: str = ""
    _keys: dict[BlockNaming, ChunkKeys] = field(default_factory=dict, repr=False, compare=False)
    _digests: dict[int, Iterator[bytes]] = field(default_factory=dict, repr=False, compare=False)

    async def keys(self, naming: BlockNaming) -> ChunkKeys:
        """Return the keys of its whole blocks. Those of long prompts are computed in a thread."""
        if naming not in self._keys:
            if len(self.tokens) > _TOKENS_AT_ONCE:
                self._keys[naming] = await asyncio.to_thread(naming.keys, self.tokens, self.cache_salt)
            else:
                self._keys[naming] = naming.keys(self.tokens, self.cache_salt)
        return self._keys[naming]

    def digests(self, block_tokens: int) -> Iterator[bytes]:
        """Return the digests of its whole blocks, which name them in engines' KV events; each is computed once."""
        if block_tokens not in self._digests:
            self._digests[block_tokens] = digests_of(self.tokens, block_tokens, self.adapter, self.cache_salt)
        self._digests[block_tokens], digests = tee(self._digests[block_tokens])
        return digests


class Tokenizer:
    """Asks engines for the tokens of prompts.

    Args:
        session: For requests to engines.
        headers: Of these requests.
    """

    def __init__(self, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        self._session = session
        self._headers = headers

    async def prompt_of(self, request: GenerationRequest, engines: Sequence[RoutedEngine]) -> Prompt:
        """Return a request's prompt; its tokens are unknown if it is a batch, has images, or no engine tokenizes it.

        Args:
            request: The request.
            engines: Serve the request's model; those with the fewest requests are asked first.
        """
        tokens = token_prompt(request)
        if tokens is None and _is_text(request):
            for engine in sorted(engines, key=lambda engine: engine.requests)[:_ASKED]:
                tokens = await self._ask(request, engine)
                if tokens is not None:
                    break
        adapter = request.model if any(engine.has_adapter(request.model) for engine in engines) else ""
        length = len(tokens) if tokens is not None else max(1, len(request.raw) // _CHARACTERS_PER_TOKEN)
        return Prompt(tokens=tokens or (), length=length, adapter=adapter, cache_salt=request.cache_salt)

    async def _ask(self, request: GenerationRequest, engine: RoutedEngine) -> Sequence[int] | None:
        question = {name: request.body[name] for name in _COPIED[request.path] if request.body.get(name) is not None}
        try:
            async with self._session.post(
                f"{engine.name}/tokenize",
                json=question,
                headers={**self._headers, **_key_of(request)},
                timeout=aiohttp.ClientTimeout(total=_TOKENIZE_S),
            ) as answer:
                tokens = (await answer.json())["tokens"] if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            engine.suspected.set()
            logger().info("prompt is not tokenized", engine=engine.name, error=repr(error))
            return None
        return tokens_of(tokens)


def _is_text(request: GenerationRequest) -> bool:
    """Return whether the prompt is one text, without images, audio or video."""
    if request.path == COMPLETIONS:
        return isinstance(request.body.get("prompt"), str) and not request.body.get("prompt_embeds")
    messages: Any = request.body.get("messages")
    if not isinstance(messages, list):
        return False
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)


def _key_of(request: GenerationRequest) -> Mapping[str, str]:
    key = next((value for name, value in request.headers.items() if name.lower() == "authorization"), "")
    return {"Authorization": key} if key else {}
