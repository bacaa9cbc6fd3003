"""The short form of the benchmarks that a newcomer asks about: one table, each line against its baseline."""

from __future__ import annotations

from quire_bench import delivery, lookup, store
from quire_tools.report import Report, Row

_CONTEXT, _CHUNK_TOKENS, _HIT, _LAYERS = 8192, 16, 0.875, 32
_STORE_KIB, _STORE_MIB = 1024, 256


def run(rounds: int) -> Report:
    """Look-ups, deliveries and stores, `rounds` of each."""
    report = Report("", {"name": "see each line, same run", "unit": "same unit"}, tall=True)
    report.rows.append(_lookup(rounds))
    for transport, name in (("ucx", "UCX"), ("shm", "shared memory")):
        report.rows += _delivery(transport, name, rounds)
        report.rows.append(_store(transport, name, rounds))
    report.notes += [
        "look-up: the baseline is a look-up of no key, the same round trip",
        f"delivery: {_CONTEXT} tokens of Llama 3.1 8B, {_HIT:.1%} cached, G = {_CHUNK_TOKENS}; every slice verified",
        "its baseline is a bare pyucx stream of the same layers, unverified; of times the ratio is baseline / Quire",
        f"store: {_STORE_MIB} MiB in chunks of 1 MiB, to memory, indexed; the baseline is a stream of the same bytes",
        "each alone, with all options: quire bench lookup, delivery, store",
    ]
    return report


def _lookup(rounds: int) -> Row:
    row, _ = lookup.run(65_536, _CHUNK_TOKENS, 20 * rounds, 16).rows
    return _line(
        f"look-up of {row.params['keys']} keys, leased, ms", row.measured["median ms"], row.baseline, row.ratio
    )


def _delivery(transport: str, name: str, rounds: int) -> list[Row]:
    (row,) = delivery.run("memory", transport, [_CHUNK_TOKENS], [_CONTEXT], _HIT, _LAYERS, rounds).rows
    first, bare = row.measured["first layer ms"], row.measured["bare first layer ms"]
    return [
        _line(f"delivery by {name}, GB/s", row.measured["GB/s"], row.baseline, row.ratio, row.measured["CPU s/GB"]),
        _line("its first layer, look-up included, ms", first, bare, bare / first),
    ]


def _store(transport: str, name: str, rounds: int) -> Row:
    (row,) = store.run(["memory"], transport, [_STORE_KIB], _STORE_MIB, _CHUNK_TOKENS, rounds).rows
    return _line(f"store by {name}, GB/s", row.measured["GB/s"], row.baseline, row.ratio, row.measured["CPU s/GB"])


def _line(what: str, measured: float, baseline: float, ratio: float, cpu: float = float("nan")) -> Row:
    return Row({"what": what}, {"measured": measured, "services' CPU s/GB": cpu}, baseline, ratio)
