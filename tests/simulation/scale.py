"""Constants of the product, scaled to a simulated day: everything there is some ten times quicker, and smaller."""

from __future__ import annotations

from typing import Final

import quire.client.delivery as delivery_module
import quire.client.memory.quiescence as quiescence_module
import quire.client.samples as samples_module
import quire.model.keys as keys_module
import quire.transport.copying as copying_module
import quire_server.lookups as lookups_module
import quire_server.redis.prefix_index.bucket_scripts as scripts_module
import quire_server.redis.prefix_index.format as format_module
import quire_server.redis.prefix_index.index as index_module
import quire_server.redis.prefix_index.slots as slots_module
from quire.testing.simulation.loop import SimulatedLoop, VirtualTime
from quire.testing.simulation.shared_memory import wait_in_thread
from quire_storage.adapters import cluster as cluster_at_node
from quire_storage.cluster import hot_copies as hot_at_node
from quire_storage.cluster import replication as replication_at_node
from quire_storage.delivery import batches as batches_at_node
from quire_storage.delivery import delivery as delivery_at_node

BUCKET_CHUNKS: Final = 4
"""Of the index: so that prefixes cross its buckets."""
_HASH_TAGS: Final = 4
HOT: Final = {"link_bytes_per_s": 40_000_000, "hot_share": 0.0005, "hot_idle_s": 2.0}
"""Settings of a node with which what is read a few times within seconds is copied to others."""


def scale(loop: SimulatedLoop) -> None:
    """Change the constants in this process."""
    vars(delivery_module)["time"] = VirtualTime(loop)
    quiescence_module.MARGIN_S = 5.0  # type: ignore[misc]
    vars(delivery_at_node)["_QUIESCE_TIMEOUT_S"] = 0.4
    vars(cluster_at_node)["COPY_S_MAX"] = vars(replication_at_node)["COPY_S_MAX"] = 7.0
    for module in (keys_module, index_module, format_module, lookups_module, samples_module):
        vars(module)["BUCKET_CHUNKS"] = BUCKET_CHUNKS
    vars(samples_module)["_SAMPLED_FROM"] = BUCKET_CHUNKS + 1
    vars(index_module)["LINK_MS"] = vars(scripts_module)["LINK_MS"] = 2_000
    vars(batches_at_node)["wait_in_thread"] = wait_in_thread
    del slots_module.TAGS[_HASH_TAGS:]  # sweeps of the index ask all of them
    vars(hot_at_node).update(_HOT_SHARE=2e-4, _COLD_SHARE=1e-4)
    vars(copying_module)["_AHEAD_BYTES"] = 1 << 14  # a turn of a thread is some layers
