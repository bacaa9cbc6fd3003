"""Records on the wire: columns that are refused, and messages for services of the release before."""

from __future__ import annotations

from typing import Any

import pytest

from quire.model.descriptor import RdmaTarget
from quire.model.durability import Durability, OnExisting
from quire.model.errors import InvalidRequest
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.model.ranges import ChunkRange
from quire.model.records import ChunkRecord, records
from quire.model.transfers import IngestOrder
from quire.wire.convert_records import COLUMNS_FROM, ask_about, messages_to, records_from, records_to, reporter_of
from quire.wire.convert_transfers import ingest_order_from, ingest_order_to
from quire.wire.v1 import orchestrator_pb2 as pb

_KEYS = ChunkKeys(b"".join(number.to_bytes(32, "big") for number in range(1, 301)))
_CHAIN = records(_KEYS, 250, 20, namespace=b"n" * 16)
_LAYOUT = KvLayout(2, 16, 1, 8, Dtype.FP16)


def _order() -> IngestOrder:
    return IngestOrder(
        layout=_LAYOUT,
        records=_CHAIN,
        store_id=b"s" * 16,
        source=RdmaTarget(b"w", 4096, _LAYOUT.payload_bytes(20), b"k"),
        source_ranges=(ChunkRange("a", 0, 20),),
        source_chunks=20,
        node_index=0,
        durability=Durability.MEMORY,
        on_existing=OnExisting.SKIP,
        namespace_digest=b"n" * 32,
    )


class _Orchestrator:
    """Answers 7 for each chunk that it reads. `has_columns`: not of the release before.

    `counted`: the reporters of its calls that name one.
    """

    def __init__(self, *, has_columns: bool) -> None:
        self.has_columns = has_columns
        self.calls = 0
        self.counted = list[str]()

    async def commit(self, request: pb.CommitRequest, **_: Any) -> pb.CommitResponse:
        self.calls += 1
        count = len(records_from(request)) if self.has_columns else len(request.chunks)
        reporter = reporter_of(request) if self.has_columns else request.reporter
        self.counted += [reporter] if reporter else []
        return pb.CommitResponse(generations=[7] * count)


@pytest.mark.parametrize(("has_columns", "calls"), [(True, 1), (False, 2)])
async def test_an_orchestrator_of_the_release_before_is_asked_in_its_own_form(has_columns: bool, calls: int) -> None:
    orchestrator = _Orchestrator(has_columns=has_columns)
    request = pb.CommitRequest(node_id="a", records=records_to(_CHAIN, "a"))
    answer = await ask_about(orchestrator.commit, request, "generations", timeout_s=5)
    assert list(answer.generations) == [7] * 20 and orchestrator.calls == calls
    assert orchestrator.counted == ["a"], "an index with more reports than the node made hides that it went back"


async def test_nothing_is_asked_again_about_no_chunk() -> None:
    orchestrator = _Orchestrator(has_columns=True)
    await ask_about(orchestrator.commit, pb.CommitRequest(records=records_to([])), "generations", timeout_s=5)
    assert orchestrator.calls == 1


@pytest.mark.parametrize("protocol", [COLUMNS_FROM - 1, COLUMNS_FROM])
def test_a_store_reaches_nodes_of_both_releases(protocol: int) -> None:
    message = ingest_order_to(_order(), protocol)
    assert bool(message.chunks) == (protocol < COLUMNS_FROM) != message.HasField("records")
    order = ingest_order_from(message)
    assert (order.records, order.records.namespaces) == (_CHAIN, b"n" * 16 * 20)


def test_a_store_gets_the_tag_of_its_namespace() -> None:
    message = ingest_order_to(_order(), COLUMNS_FROM)
    message.records.namespaces = bytes(16 * 20)
    assert ingest_order_from(message).records.namespaces == b"n" * 16 * 20


@pytest.mark.parametrize("digest", [b"", b"n" * 5])
def test_a_short_digest_is_a_tag_with_zeros(digest: bytes) -> None:
    message = ingest_order_to(_order(), COLUMNS_FROM)
    message.records.namespaces, message.namespace_digest = bytes(16 * 20), digest
    assert ingest_order_from(message).records.namespaces == digest.ljust(16, b"\0") * 20


@pytest.mark.parametrize("column", ["keys", "parents", "buckets", "parent_buckets", "namespaces"])
@pytest.mark.parametrize("length", [0, 31, 19 * 32])
def test_columns_that_do_not_fit_are_refused(column: str, length: int) -> None:
    request = pb.CommitRequest(records=records_to(_CHAIN))
    setattr(request.records, column, bytes(length))
    with pytest.raises(InvalidRequest) as refusal:
        records_from(request)
    assert refusal.value.field == "records"


@pytest.mark.parametrize(
    "broken",
    [
        ChunkRecord(b"k" * 31, b"", b"b" * 32, b""),
        ChunkRecord(b"k" * 32, b"", b"b" * 33, b""),
        ChunkRecord(b"k" * 32, b"p" * 5, b"b" * 32, b"b" * 32),
        ChunkRecord(b"k" * 32, b"p" * 32, b"b" * 32, b""),
    ],
)
def test_a_message_with_a_key_of_another_length_is_refused(broken: ChunkRecord) -> None:
    with pytest.raises(InvalidRequest, match="32 bytes") as refusal:
        records_from(pb.CommitRequest(chunks=messages_to([*_CHAIN, broken])))
    assert refusal.value.field == "chunks"
