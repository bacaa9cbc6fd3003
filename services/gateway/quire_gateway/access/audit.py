"""The audit log: one JSON line for each act of an operator, and for each access that was denied."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from quire.model.errors import AddressUnproven, ConfigInvalid, LeaseForged, NotAllowed, Unauthenticated
from quire.telemetry import logger
from quire_gateway.access.admission import CALLER
from quire_gateway.core.s3_errors import S3Error
from quire_server.clock import Clock
from quire_server.telemetry.otlp_logs import OtlpLog

Record = Mapping[str, str | int | bool]
_DENIALS: Final = (NotAllowed, Unauthenticated, LeaseForged)
_S3_DENIALS: Final = frozenset({"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"})
_A_SECOND_MAX: Final = 100


class AuditLog:
    """Appends to a file, or writes to the standard error output.

    Of denied accesses at most a hundred a second are written; the next line says how many were left out.
    """

    def __init__(self, path: str, clock: Clock, collector: OtlpLog | None = None) -> None:
        """Open the file.

        Args:
            path: Of the file; empty for the standard error output.
            clock: The gateway's.
            collector: Has each record, too.

        Raises:
            ConfigInvalid: The file cannot be opened.
        """
        try:
            self._file = Path(path).open("a", encoding="utf-8") if path else sys.stderr  # noqa: SIM115
        except OSError as error:
            raise ConfigInvalid(f"QUIRE_GATEWAY_AUDIT_LOG={path!r}: {error}") from None
        self._clock = clock
        self._collector = collector
        self._second = 0
        self._written = 0
        self._left_out = 0

    def act(self, act: str, subject: str, error: BaseException | None) -> None:
        """Record an act of an operator, which has succeeded, failed, or was abandoned and may have succeeded."""
        outcome = "ok" if error is None else f"{_code_of(error)}: {error}"
        self._write("act", act, subject, outcome)

    def act_elsewhere(self, act: str, subject: str, by: str, at_ms: int) -> None:
        """Record an act that changed Redis directly. `by`: the user and host; `at_ms`: when, Unix epoch."""
        about: Record = {"at_ms": at_ms, "key": "", "tenant": "", "operator": True, "by": by}
        self._append({"audit": "act", **about, "act": act, "object": subject, "outcome": "ok"})

    def request(self, method: str, error: Exception) -> None:
        """Record a request that has failed, if its access was denied."""
        denied = isinstance(error, _DENIALS) or (isinstance(error, S3Error) and error.code in _S3_DENIALS)
        nonce = isinstance(error, AddressUnproven) and error.field == "nonce"  # late ones are sent again
        if denied and not nonce and self._has_room():
            self._write("denied", method, getattr(error, "field", ""), f"{_code_of(error)}: {error}")

    def _has_room(self) -> bool:
        second = int(self._clock.monotonic_s())
        if second != self._second:
            self._second, self._written = second, 0
        self._written += 1
        if self._written > _A_SECOND_MAX:
            self._left_out += 1
            return False
        return True

    def _write(self, kind: str, act: str, subject: str, outcome: str) -> None:
        caller = CALLER.get()
        record: dict[str, str | int | bool] = {
            "audit": kind,
            "at_ms": self._clock.now_ms(),
            "key": caller.key.name if caller is not None and caller.key is not None else "",
            "tenant": caller.tenant if caller is not None else "",
            "operator": caller is not None and caller.operator,
            "act": act,
            "object": subject,
            "outcome": outcome,
        }
        if self._left_out:
            record["left_out"], self._left_out = self._left_out, 0
        self._append(record)

    def _append(self, record: Record) -> None:
        if self._collector is not None:
            self._collector.write(record, at_ms=int(record["at_ms"]), warns=record["audit"] == "denied")
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except (OSError, ValueError) as error:  # a full disk, a closed pipe: requests go on
            logger().error("the audit log cannot be written", error=str(error))


def _code_of(error: BaseException) -> str:
    code = getattr(error, "code", type(error).__name__)
    return str(code()) if callable(code) else str(code)
