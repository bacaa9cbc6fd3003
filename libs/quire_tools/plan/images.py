"""`quire plan images`: what images cost over the years, as pixels or as latents (LatentBox, §6.4).

Eq. 3: N(t)·S_px·P_S3. Eq. 4: N(t)·(S_lat + f·S_px)·P_S3 + M(t)·t_dec·P_GPU. Month by month, summed. The defaults are
the paper's Table 5; up to today N grows as its trace did, afterwards by a number of images per month.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Final

import typer

from quire.model.errors import InvalidRequest
from quire_tools.plan.image_trace import read_trace
from quire_tools.report import Report, Row

_ARCHIVE_MONTHS: Final = 60


@dataclass(frozen=True, slots=True)
class Scenario:
    """Sizes in MB, prices in dollars: per GB and month, per GPU hour, per GB and per request retrieved.

    `images`, `months`, `views`: so far. `added`: images per month from now on. `decodes`: share of views that need
    one. `old_views`: per image and year, once it is five years old.
    """

    image_mb: float = 1.5
    latent_mb: float = 0.29
    s3_gb_month: float = 0.023
    archive_gb_month: float = 0.004
    retrieval_gb: float = 0.01
    retrieval_request: float = 0.0001
    decode_ms: float = 40.0
    cache_share: float = 0.01
    decodes: float = 0.632
    views_per_year: float = 10.2
    old_views: float = 0.5
    images: float = 92.3e6
    months: int = 35
    views: float = 2.07e9
    added: float = 3.76e6

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise InvalidRequest(f"{value} is negative or not finite", field=field.name)
        if not (self.images and self.months and self.image_mb):
            raise InvalidRequest("there must be images, months and a size", field="images")

    def stored(self, month: int) -> float:
        """N at the end of a month, counted from the beginning. So far it grew so that it ends at the present pace."""
        if month > self.months:
            return self.images + self.added * (month - self.months)
        # a·m + b·m², with the slope `added` at the end if that leaves no month without growth.
        bend = max(0.0, min(self.added * self.months - self.images, self.images)) / self.months**2
        return (self.images / self.months - bend * self.months) * month + bend * month**2


@dataclass(frozen=True, slots=True)
class ImagePrices:
    """Yearly fall of prices, and the cost of a GPU per hour."""

    name: str
    gpu_fall: float
    storage_fall: float


def cumulative(
    scenario: Scenario, prices: ImagePrices, until_month: int, gpu_hours: dict[str, float]
) -> dict[str, float]:
    """Dollars from the beginning to the end of a month: image store, with archive, and as latents by GPU."""
    totals = {"ImgStore": 0.0, "ImgStore + archive": 0.0, **{f"latents, {name}": 0.0 for name in gpu_hours}}
    for month in range(1, until_month + 1):
        years = max(0, month - scenario.months) / 12
        storage = (1 - prices.storage_fall) ** years
        gpu = (1 - prices.gpu_fall) ** years
        count = scenario.stored(month)
        s3 = scenario.s3_gb_month * storage / 1000
        totals["ImgStore"] += count * scenario.image_mb * s3
        old = scenario.stored(max(0, month - _ARCHIVE_MONTHS))
        retrieved = old * scenario.old_views / 12
        totals["ImgStore + archive"] += (
            (count - old) * scenario.image_mb * s3
            + old * scenario.image_mb * scenario.archive_gb_month * storage / 1000
            + retrieved * (scenario.image_mb * scenario.retrieval_gb / 1000 + scenario.retrieval_request)
        )
        past = month <= scenario.months
        views = scenario.views / scenario.months if past else scenario.views_per_year * count / 12
        for name, price in gpu_hours.items():
            decode = scenario.decode_ms / 3.6e6 * price * gpu
            stored_mb = scenario.latent_mb + scenario.cache_share * scenario.image_mb
            totals[f"latents, {name}"] += count * stored_mb * s3 + views * scenario.decodes * decode
    return totals


def run(scenario: Scenario, first_year: int, horizons: list[int], gpu_hours: dict[str, float]) -> Report:
    """Cumulative costs, relative to the image store's today, under constant and under falling prices."""
    if any(year < first_year for year in horizons) or not horizons:
        raise InvalidRequest(f"{horizons}: years from {first_year} on", field="horizons")
    report = Report(
        "plan images",
        {"name": "ImgStore, same horizon and prices", "unit": "cumulative, ImgStore today = 1"},
        tall=True,
    )
    constant = ImagePrices("constant", 0.0, 0.0)
    unit = cumulative(scenario, constant, scenario.months, gpu_hours)["ImgStore"]
    for prices in (constant, ImagePrices("GPU -20%, storage -10% a year", 0.2, 0.1)):
        for year in horizons:
            months = scenario.months + 12 * (year - first_year)
            costs = {name: cost / unit for name, cost in cumulative(scenario, prices, months, gpu_hours).items()}
            best = min(cost for name, cost in costs.items() if name.startswith("latents"))
            params = {"prices": prices.name, "year": year}
            report.rows.append(Row(params, costs, costs["ImgStore"], costs["ImgStore"] / best))
    report.notes.append(f"the image store has cost ${unit:,.0f} so far; ratio: against latents on the cheapest GPU")
    return report


def command(
    trace: Annotated[
        Path | None, typer.Option(help="CSV of accesses: images, views, months and sizes come from it")
    ] = None,
    images: Annotated[float, typer.Option(help="stored so far")] = 92.3e6,
    months: Annotated[int, typer.Option(help="since the first of them")] = 35,
    added: Annotated[float, typer.Option(help="images per month from now on")] = 3.76e6,
    views_per_year: Annotated[float, typer.Option(help="per image")] = 10.2,
    image_mb: Annotated[float, typer.Option(help="size of an image as pixels, MB")] = 1.5,
    latent_mb: Annotated[float, typer.Option(help="size of its latent, MB")] = 0.29,
    decodes: Annotated[float, typer.Option(help="share of views that need a decode")] = 0.632,
    decode_ms: Annotated[float, typer.Option(help="time of a decode on the device, ms")] = 40.0,
    s3_gb_month: Annotated[float, typer.Option(help="price of a GB in S3 for a month, dollars")] = 0.023,
    archive_gb_month: Annotated[float, typer.Option(help="price of a GB in the archive for a month, dollars")] = 0.004,
    gpu_hour: Annotated[str, typer.Option(help="name=dollars, separated by commas")] = "H100=2.50,RTX 5090=0.69",
    first_year: Annotated[int, typer.Option(help="images of the first year")] = 2026,
    horizons: Annotated[str, typer.Option(help="years to look at, separated by commas")] = "2026,2030,2040,2050",
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw the result there (PNG)")] = None,
) -> None:
    """Show the cost of images over the years: stored as PNG, with an archive, or as latents decoded on demand."""
    scenario = Scenario(
        image_mb=image_mb,
        latent_mb=latent_mb,
        s3_gb_month=s3_gb_month,
        archive_gb_month=archive_gb_month,
        decode_ms=decode_ms,
        decodes=decodes,
        views_per_year=views_per_year,
        images=images,
        months=months,
        views=images * views_per_year / 12 * months / 2 if images != Scenario().images else Scenario().views,
        added=added,
    )
    if trace is not None:
        scenario = _of_trace(scenario, trace)
    try:
        gpus = {name.strip(): float(price) for name, _, price in (part.partition("=") for part in gpu_hour.split(","))}
        years = [int(year) for year in horizons.split(",")]
    except ValueError as error:
        raise InvalidRequest(f"{error}", field="gpu_hour, horizons") from None
    report = run(scenario, first_year, years, gpus)
    report.show(json_file, plot, draw=lambda path: draw_costs(report, path))


def _of_trace(scenario: Scenario, file: Path) -> Scenario:
    accesses = read_trace(file)
    months = max(1, round((accesses.times[-1] - accesses.times[0]) / (30.44 * 86_400)))
    count = len(accesses.image_bytes)
    return replace(
        scenario,
        images=float(count),
        months=months,
        views=float(len(accesses)),
        views_per_year=len(accesses) / count / months * 12,
        added=count / months,
        image_mb=float(accesses.image_bytes.mean()) / 1e6,
        latent_mb=float(accesses.latent_bytes.mean()) / 1e6,
    )


def draw_costs(report: Report, path: Path) -> None:
    """Cumulative cost by set-up and horizon, relative to the first (LatentBox, Figure 8)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    groups = list(dict.fromkeys(row.params["prices"] for row in report.rows))
    width = 0.8 / len(report.rows[0].measured)
    rows = report.rows
    for index, name in enumerate(rows[0].measured):
        places = [at + (index - len(rows[0].measured) / 2) * width for at in range(len(rows))]
        axes.bar(places, [row.measured[name] for row in rows], width, label=name)
    axes.set_xticks(range(len(rows)), [f"{row.params['year']}\n{row.params['prices']}" for row in rows], fontsize=7)
    axes.set(yscale="log", ylabel="cumulative cost, first year's image store = 1", title=f"prices: {', '.join(groups)}")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
