"""The SDK: `Client`, and `AsyncClient` for asyncio."""

from quire.client.admin import AdminClient
from quire.client.blocking.cache import CachedPrefix, KvCache
from quire.client.blocking.client import Client
from quire.client.blocking.images import Images
from quire.client.blocking.transfers import SyncDelivery, SyncRetrieval, SyncStoreSession
from quire.client.cache import AsyncCachedPrefix, AsyncKvCache, PrefixDelivery
from quire.client.client import AsyncClient
from quire.client.delivery import Delivery
from quire.client.images import EncodedImage, Image, ImageClient
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
    "AsyncCachedPrefix",
    "AsyncClient",
    "AsyncKvCache",
    "Buffer",
    "CachedPrefix",
    "Client",
    "Delivery",
    "EncodedImage",
    "FetchSummary",
    "Image",
    "ImageClient",
    "Images",
    "KvCache",
    "Lookup",
    "MemberSpans",
    "PrefixDelivery",
    "Prompt",
    "Rendering",
    "Retrieval",
    "SlicePlaces",
    "StoreSession",
    "StoreSummary",
    "SyncDelivery",
    "SyncRetrieval",
    "SyncStoreSession",
    "Urgency",
]
