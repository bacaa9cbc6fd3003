"""Errors of the orchestrator; all else comes from `quire.model.errors`.

NoStorageNode (quire.model.errors)
└── NoDurableNode       durability asks for more storage nodes than are alive
"""

from quire.model.errors import NoStorageNode


class NoDurableNode(NoStorageNode):
    """Durability asks for more storage nodes than are alive."""
