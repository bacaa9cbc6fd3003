"""Errors of the orchestrator; all else comes from `quire.errors`.

NoStorageNode (quire.errors)
└── NoDurableNode       durability asks for more storage nodes than are alive
"""

from quire.errors import NoStorageNode


class NoDurableNode(NoStorageNode):
    """Durability asks for more storage nodes than are alive."""
