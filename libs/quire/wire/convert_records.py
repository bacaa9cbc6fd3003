"""Records of chunks on the wire: columns. Services of the release before send and read a message for each chunk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from quire.model.errors import InvalidRequest
from quire.model.keys import KEY_BYTES
from quire.model.policy import NAMESPACE_TAG_BYTES
from quire.model.records import NO_NAMESPACE, ChunkRecord, ChunkRecords
from quire.wire.channels import call
from quire.wire.v1 import orchestrator_pb2 as pb

COLUMNS_FROM: Final = 4
"""The first protocol with columns."""


def records_to(chunks: Iterable[ChunkRecord], reporter: str = "") -> pb.ChunkRecords:
    """`reporter`: the node that counts its reports, of a request that reports a change."""
    records = ChunkRecords.of(chunks)
    return pb.ChunkRecords(
        keys=records.keys,
        parents=records.parents,
        buckets=records.buckets,
        parent_buckets=records.parent_buckets,
        namespaces=records.namespaces,
        reporter=reporter,
    )


def records_from(request: Any, namespace: bytes = NO_NAMESPACE) -> ChunkRecords:
    """Return the records that a request names, by columns or by a message for each.

    Args:
        request: Any request with `records` and `chunks`.
        namespace: Tag of their namespace, where the request says none.

    Raises:
        InvalidRequest: A column, or a key, has another size.
    """
    if request.chunks:
        return _records_of(request.chunks, namespace)
    columns = request.records
    records = ChunkRecords(columns.keys, columns.parents, columns.buckets, columns.parent_buckets, columns.namespaces)
    return records.in_namespace(namespace)


def reporter_of(request: Any) -> str:
    """Return the node that counts this report, empty for none. `request`: one that reports a change."""
    return str(request.records.reporter or request.reporter)


def messages_to(chunks: Iterable[ChunkRecord]) -> list[pb.ChunkRecord]:
    """Return a message for each chunk, for a service of the release before."""
    return [
        pb.ChunkRecord(
            key=chunk.key,
            parent=chunk.parent,
            bucket=chunk.bucket,
            parent_bucket=chunk.parent_bucket,
            namespace=chunk.namespace if chunk.namespace != NO_NAMESPACE else b"",
        )
        for chunk in chunks
    ]


async def ask_about(method: Any, request: Any, answers: str, *, timeout_s: float) -> Any:
    """Call an orchestrator about the chunks of `request.records`.

    An orchestrator of the release before does not read columns. Its response is about no chunk, and the request is sent
    again in its own form.

    Args:
        method: Of the orchestrator's stub.
        request: Any request with `records` and `chunks`.
        answers: Field of the response that has an element for each chunk.
        timeout_s: Of each call.

    Raises:
        QuireError: That of the orchestrator.
    """
    response = await call(method, request, timeout_s=timeout_s)
    if request.records.keys and not getattr(response, answers):
        records = records_from(request)
        if reporter := request.records.reporter:  # it was not counted yet
            request.reporter = reporter
        request.ClearField("records")
        request.chunks.extend(messages_to(records))
        response = await call(method, request, timeout_s=timeout_s)
    return response


def _records_of(messages: Iterable[pb.ChunkRecord], namespace: bytes) -> ChunkRecords:
    rows = [
        ChunkRecord(
            message.key,
            message.parent,
            message.bucket,
            message.parent_bucket,
            message.namespace[:NAMESPACE_TAG_BYTES].ljust(NAMESPACE_TAG_BYTES, b"\0"),
        )
        for message in messages
    ]
    for row in rows:
        own_sizes, parent_sizes = {len(row.key), len(row.bucket)}, {len(row.parent), len(row.parent_bucket)}
        if own_sizes != {KEY_BYTES} or parent_sizes not in ({KEY_BYTES}, {0}):
            raise InvalidRequest(f"a key is not of {KEY_BYTES} bytes", field="chunks")
    return ChunkRecords.of(rows).in_namespace(namespace)
