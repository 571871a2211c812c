"""`GET /metrics`: the engine's numbers in the text format of Prometheus. Annotations of the fields define the metrics.

Labels are printable, for people who read the text in a terminal. This module is imported at the first scrape, since the
import of prometheus_client would make each start a tenth longer.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate
from operator import attrgetter, sub
from typing import get_type_hints

from prometheus_client import CollectorRegistry, metrics_core
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from protocol.stats import Counter, Info, Metric, Sample
from runner.cache.layer_interface import Miss
from runner.logs import printable
from runner.numbers.journal import Distribution, EngineStats

Read = Callable[[EngineStats], object]
_PREFIX = "mlx_runner_"
_ZEROS = {"cache_misses": {str(reason): 0 for reason in Miss if reason}}
"""Metric -> samples that are 0 from the first scrape on. Prometheus' `rate` misses the event with which one appears."""


def annotations(struct: type, path: str = "") -> Iterator[tuple[Metric | Sample, Read]]:
    """Yields each annotation of each field, at any depth, with a function that reads the field's number."""
    for name, hint in get_type_hints(struct, include_extras=True).items():
        for mark in getattr(hint, "__metadata__", ()):
            yield mark, _difference(path + name, path + mark.less) if mark.less else attrgetter(path + name)
        if isinstance(hint, type):
            yield from annotations(hint, f"{path}{name}.")


def _difference(path: str, less: str) -> Read:
    both = attrgetter(path, less)
    return lambda published: sub(*both(published))


def _by_metric() -> dict[Metric, dict[str, Read]]:
    """Returns metric -> label -> reader of the number, in the order of `/metrics`. A metric's own field comes first."""
    fields = list(annotations(EngineStats))
    order: list[Metric] = []
    for mark, _ in fields:
        if isinstance(mark, Metric):
            names = [metric.name for metric in order]
            order.insert(names.index(mark.before) if mark.before else len(order), mark)
    fields.sort(key=lambda field: isinstance(field[0], Sample))
    return {metric: {mark.of: read for mark, read in fields if mark.name == metric.name} for metric in order}


METRICS = _by_metric()


class Exporter(Collector):
    """A collector for prometheus_client, which yields the numbers of one moment as metrics."""

    def __init__(self, published: EngineStats) -> None:
        self._published = published

    def collect(self) -> Iterator[metrics_core.Metric]:
        for metric, fields in METRICS.items():
            values = {of: read(self._published) for of, read in fields.items()}
            if None not in values.values():
                yield _family(metric, values)


def scrape(published: EngineStats, accept: str) -> tuple[bytes, str]:
    """Returns the body and the content type of an answer to a request with this `Accept` header."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Exporter(published))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def _family(metric: Metric, values: dict[str, object]) -> metrics_core.Metric:
    """Returns a metric with samples. `values` are label -> value of the field with that label."""
    name = (_PREFIX + metric.name).rstrip("_")
    if isinstance(metric, Info):
        about = {label: printable(str(value)) for label, value in values.items()}
        return metrics_core.InfoMetricFamily(name, metric.help, value=about)
    found = values.get("")
    if isinstance(found, Distribution):
        edges = [*map(floatToGoString, found.bounds), "+Inf"]
        buckets = list(zip(edges, map(float, accumulate(found.counts)), strict=True))
        return metrics_core.HistogramMetricFamily(name, metric.help, buckets=buckets, sum_value=found.total)
    make = metrics_core.CounterMetricFamily if isinstance(metric, Counter) else metrics_core.GaugeMetricFamily
    family = make(name, metric.help, labels=[metric.label] if metric.label else [])
    for of, value in values.items():
        for label, number in _samples(metric, of, value):
            family.add_metric([label] if metric.label else [], number)
    return family


def _samples(metric: Metric, of: str, value: object) -> Iterator[tuple[str, float]]:
    """Yields (label, number) for each sample of a field with this value."""
    match value:
        case dict():
            yield from {**_ZEROS.get(metric.name, {}), **value}.items()
        case list() if metric.label:
            for member in value:
                yield str(getattr(member, metric.label)), getattr(member, of)
        case list():
            yield of, len(value)
        case int() | float():
            yield of, value / metric.per
