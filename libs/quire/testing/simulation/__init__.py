"""Parts of a cluster in one process on virtual time: a loop, a network, a data plane, an object tier.

A run is decided by its seed alone. Data moves when an operation ends, not when it begins, so that memory which changes
hands in between is seen.
"""

from quire.testing.simulation.loop import Deadlock, Process, SimulatedLoop, current_process, simulate
from quire.testing.simulation.network import Network, SimChannels, SimServer
from quire.testing.simulation.objects import SimBlobs, SimObjects
from quire.testing.simulation.shared_memory import SimNearestTransport, SimSharedPeer
from quire.testing.simulation.transport import Fabric, SimTransport

__all__ = [
    "Deadlock",
    "Fabric",
    "Network",
    "Process",
    "SimBlobs",
    "SimChannels",
    "SimNearestTransport",
    "SimObjects",
    "SimServer",
    "SimSharedPeer",
    "SimTransport",
    "SimulatedLoop",
    "current_process",
    "simulate",
]
