"""Requests of a trace in Mooncake's format."""

from __future__ import annotations

import json
from pathlib import Path

from quire.model.errors import InvalidRequest


def read_trace(file: Path) -> list[list[bytes]]:
    """Mooncake's format: JSON lines with `hash_ids`, the blocks of a request's prefix. Raises `InvalidRequest`."""
    return [blocks for blocks, _, _ in read_requests(file)]


def read_requests(file: Path) -> list[tuple[list[bytes], int, float]]:
    """Read a trace.

    Returns:
        For each request its blocks, its input tokens (0 if unknown) and its arrival, seconds.

    Raises:
        InvalidRequest: The file is no such trace.
    """
    try:
        with file.open() as lines:
            records = [json.loads(line) for line in lines if line.strip()]
        trace = [
            (
                [int(block).to_bytes(8, "big") for block in record["hash_ids"]],
                int(record.get("input_length", 0)),
                float(record.get("timestamp", 0)) / 1e3,
            )
            for record in records
        ]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, AttributeError) as error:
        raise InvalidRequest(f"{file} is no trace in Mooncake's format: {error!r}", field="trace") from None
    if not trace:
        raise InvalidRequest(f"{file} is empty", field="trace")
    return trace
