"""A reused prefix over time: when each layer was read, was on the wire, was waited for, and was computed with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from quire.integrations.transformers import Prefill
from quire.telemetry import names
from quire_tools.spans import Trace

_READ: Final = ("read and verified", "#9a9a9a")
_WIRE: Final = ("on the wire, at the rate of its share", "#e0a458")
_WAIT: Final = ("the model waits", "#d1605e")
_COMPUTE: Final = ("computed", "#4878a8")


class Sent(NamedTuple):
    """A layer as one node delivered it; seconds since the request began."""

    began_s: float
    ready_s: float
    sent_s: float


def sent_layers(trace: Trace | None, began_ns: int) -> list[dict[int, Sent]]:
    """Layers by storage node, from the spans of a trace. `began_ns`: Unix time at which the request began."""
    nodes: dict[str | None, dict[int, Sent]] = defaultdict(dict)
    for span in trace.spans.values() if trace is not None else ():
        if span.name == names.STORAGE_LAYER and "quire.ready_us" in span.attributes:  # else it was not sent
            start_s = (span.start_ns - began_ns) / 1e9
            ready_s = start_s + span.attributes["quire.ready_us"] / 1e6
            layer = int(span.attributes["quire.layer"])
            nodes[span.parent_id][layer] = Sent(start_s, ready_s, (span.end_ns - began_ns) / 1e9)
    return list(nodes.values())


def draw(path: Path, result: Prefill, nodes: Sequence[Mapping[int, Sent]]) -> None:
    """Layers from top to bottom: for each a bar of every node that sent a part of it, and below them the model's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers = result.layers
    figure, axes = pyplot.subplots(figsize=(9, 0.5 * len(layers) + 2.0))

    def bars(part: tuple[str, str], spans: Sequence[tuple[float, float, float]], height: float) -> None:
        """(row, begin, end): seconds."""
        label, colour = part
        lefts, widths = [begin * 1e3 for _, begin, _ in spans], [max(0.0, end - begin) * 1e3 for _, begin, end in spans]
        axes.barh([row for row, _, _ in spans], widths, left=lefts, height=height, color=colour, label=label)

    height = 0.4 / max(1, len(nodes))
    rows = [(layer - 0.42 + height * (at + 0.5), sent) for at, node in enumerate(nodes) for layer, sent in node.items()]
    bars(_READ, [(row, sent.began_s, sent.ready_s) for row, sent in rows], 0.9 * height)
    bars(_WIRE, [(row, sent.ready_s, sent.sent_s) for row, sent in rows], 0.9 * height)
    ends = [mark.asked_s for mark in layers[1:]] + [result.ttft_s]
    bars(_WAIT, [(at + 0.15, mark.asked_s, mark.got_s) for at, mark in enumerate(layers)], 0.3)
    bars(_COMPUTE, [(at + 0.15, layers[at].got_s, end) for at, end in enumerate(ends)], 0.3)
    axes.set(yticks=range(len(layers)), ylabel="layer", xlabel="ms since the request began")
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    axes.set_title(f"{result.reused_tokens} tokens from Quire, {result.computed_tokens} computed", pad=28)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
