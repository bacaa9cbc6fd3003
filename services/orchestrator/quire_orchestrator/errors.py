"""Errors of the orchestrator; all else comes from `quire.model.errors`.

NoStorageNode (quire.model.errors)
└── NoDurableNode       the durability needs more storage nodes than are alive
"""

from quire.model.errors import NoStorageNode


class NoDurableNode(NoStorageNode):
    """The durability needs more storage nodes than are alive."""
