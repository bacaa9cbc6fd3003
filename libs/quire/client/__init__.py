"""The SDK: `QuireClient` for asyncio, `SyncClient` for engines that have no loop."""

from quire.client.admin import AdminClient
from quire.client.buffers import Buffer
from quire.client.client import Advice, Lookup, QuireClient
from quire.client.delivery import Delivery, FetchSummary
from quire.client.images import Image, ImageClient
from quire.client.store import StoreSession, StoreSummary
from quire.client.sync import SyncClient, SyncDelivery, SyncStoreSession

__all__ = [
    "AdminClient",
    "Advice",
    "Buffer",
    "Delivery",
    "FetchSummary",
    "Image",
    "ImageClient",
    "Lookup",
    "QuireClient",
    "StoreSession",
    "StoreSummary",
    "SyncClient",
    "SyncDelivery",
    "SyncStoreSession",
]
