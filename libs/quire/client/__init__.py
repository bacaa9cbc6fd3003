"""The SDK: `QuireClient` for asyncio, `SyncClient` for engines without an event loop."""

from quire.client.admin import AdminClient
from quire.client.blocking.client import SyncClient
from quire.client.blocking.transfers import SyncDelivery, SyncRetrieval, SyncStoreSession
from quire.client.client import QuireClient
from quire.client.delivery import Delivery
from quire.client.images import Image, ImageClient
from quire.client.lookup import Advice, Lookup, Prompt, SlicePlaces
from quire.client.memory.buffers import Buffer
from quire.client.retrieval import Retrieval
from quire.client.store import StoreSession
from quire.model.images import Rendering
from quire.model.nodes import MemberSpans
from quire.model.outcome import FetchSummary, StoreSummary
from quire.model.urgency import Urgency

__all__ = [
    "AdminClient",
    "Advice",
    "Buffer",
    "Delivery",
    "FetchSummary",
    "Image",
    "ImageClient",
    "Lookup",
    "MemberSpans",
    "Prompt",
    "QuireClient",
    "Rendering",
    "Retrieval",
    "SlicePlaces",
    "StoreSession",
    "StoreSummary",
    "SyncClient",
    "SyncDelivery",
    "SyncRetrieval",
    "SyncStoreSession",
    "Urgency",
]
