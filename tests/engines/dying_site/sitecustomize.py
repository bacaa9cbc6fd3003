"""Kills the first engine that has half of the layers of a load, with all of its processes; on PYTHONPATH of engines."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

_LOADS = "quire.integrations.vllm.workers.loads"


def _wait_for_loads(marker: Path) -> None:
    while not hasattr(sys.modules.get(_LOADS), "Loads"):
        time.sleep(0.02)
    load: Any = sys.modules[_LOADS].Load
    note = load.note

    def dying_note(self: Any, *, arrived: int | None = None, **more: Any) -> Any:
        if arrived == 2:  # of four layers
            try:
                marker.touch(exist_ok=False)
            except FileExistsError:
                pass  # another engine was killed
            else:
                os.killpg(os.getpgid(0), signal.SIGKILL)
        return note(self, arrived=arrived, **more)

    load.note = dying_note


if "QUIRE_TEST_KILLED" in os.environ:
    threading.Thread(target=_wait_for_loads, args=[Path(os.environ["QUIRE_TEST_KILLED"])], daemon=True).start()
