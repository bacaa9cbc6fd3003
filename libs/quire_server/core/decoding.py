"""The choice of a decoder: candidates, and the result."""

from __future__ import annotations

from typing import NamedTuple


class Candidate(NamedTuple):
    """A decoder that may be asked.

    Attributes:
        node_id: Its name.
        build: What its images depend on: only decoders of one build stand in for each other.
        devices: Decodes that run at once.
        queued: Requests that it has by its own report.
    """

    node_id: str
    build: str
    devices: int
    queued: int


class Choice(NamedTuple):
    """The decoder of a request. The request counts as running until its ticket ends.

    Attributes:
        ticket: Ends it.
        runner: The decoder that makes the image, a position among the candidates.
        owner: The decoder whose cache keeps the image, likewise.
        is_joined: The record is being decoded there already.
    """

    ticket: int
    runner: int
    owner: int
    is_joined: bool
