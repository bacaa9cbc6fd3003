"""Does this libucp gather correctly? Debian's 1.13 completes an IOV put without an error and writes the wrong bytes."""

from __future__ import annotations

import numpy as np

from pyucx.context import Context
from pyucx.errors import UcxError
from pyucx.worker import Worker

_SLICE_BYTES = 8192
_SLICES = 96


async def gathers_correctly(transports: str = "tcp,cma,rc,dc,ud") -> bool:
    """Put shuffled slices to this very process, over the transports that a remote peer would get, and compare.

    The loopback transport is left out on purpose: it would hide the fault.
    """
    rng = np.random.default_rng(7)
    source = rng.integers(0, 256, (_SLICES, _SLICE_BYTES), dtype=np.uint8)
    target = np.zeros_like(source)
    order = rng.permutation(_SLICES).astype(np.int64)
    try:
        with Context(TLS=transports) as context:
            async with Worker(context) as worker:
                local, target_region = context.register(source), context.register(target)
                try:
                    endpoint = worker.connect(worker.address())
                    remote = endpoint.remote_memory(
                        target_region.address, target_region.length, target_region.remote_key
                    )
                    await endpoint.put_gathered(local, order * _SLICE_BYTES, _SLICE_BYTES, remote, 0, timeout_s=5)
                    await endpoint.flush(timeout_s=5)
                    remote.close()
                    await endpoint.close(timeout_s=5)
                finally:
                    local.close()
                    target_region.close()
    except UcxError:
        return False
    return bool(np.array_equal(target, source[order]))
