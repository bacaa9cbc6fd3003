"""`quire cache events --zmq` tells all tenants' keys: to this host alone, unless it knows who listens."""

from __future__ import annotations

import pytest

from quire.model.errors import ConfigInvalid
from quire_tools.cli.views.events import publisher


@pytest.mark.parametrize("address", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://10.0.0.1:1", "tcp://127.example:1"])
def test_an_address_that_others_reach_wants_curve(address: str) -> None:
    with pytest.raises(ConfigInvalid, match="--curve"):
        publisher(address)
