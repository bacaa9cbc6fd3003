"""A client that may pin one MiB registers more: prints the error. `python -m tests.rdma.unprivileged`."""

from __future__ import annotations

import asyncio
import os
import resource

from quire.model.errors import QuireError
from quire.transport.ucx import UcxTransport

_NOBODY = 65534
_PINNED_MAX = 1 << 20


async def main() -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (_PINNED_MAX, _PINNED_MAX))
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)
    transport = UcxTransport()
    try:
        await transport.start()
        transport.register(transport.allocate(64 << 20))
        print("registered")
    except QuireError as error:
        print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    asyncio.run(main())
