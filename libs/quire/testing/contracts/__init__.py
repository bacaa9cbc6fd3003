"""Contract suites: what every implementation of a port has to do, as pytest classes.

Subclass one, and give it the fixture that it names; pytest-asyncio in automatic mode runs it:

    class TestMyIndex(IndexContract):
        @pytest.fixture
        def index(self) -> Index:
            return MyIndex()
"""

from quire.testing.contracts.block_io import BlockIOContract
from quire.testing.contracts.clock import ClockContract
from quire.testing.contracts.devices import CopyStreamContract
from quire.testing.contracts.index import IndexContract
from quire.testing.contracts.index_calls import IndexCallsContract
from quire.testing.contracts.index_histories import IndexHistoriesContract
from quire.testing.contracts.objects import ObjectTierContract
from quire.testing.contracts.transport import TransportContract

__all__ = [
    "BlockIOContract",
    "ClockContract",
    "CopyStreamContract",
    "IndexCallsContract",
    "IndexContract",
    "IndexHistoriesContract",
    "ObjectTierContract",
    "TransportContract",
]
