"""What `scripts/bench cache` found: as a table, as JSON and as a picture."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from scripts.tools.bench.cache.agent_trace import Workload
from scripts.tools.bench.cache.figures import CLOSE
from scripts.tools.bench.cache.rows import ModelReport
from scripts.tools.bench.common.report import Target

_HELD = 1.1

_LEGEND = f"""
hit %       tokens of prompts that came from the cache
matched     tokens of prompts that the cache had seen in their place; computed: that went through the model
lost        matched tokens that had to be computed again, over all requests; of one request p50, p95, max, and the share
            of requests that lost at most {CLOSE}
TTFT        time to the first token, median and 95th percentile; total: of all requests, closing the sessions included
held        bytes in the cache at the end, and their peak; /distinct: over the bytes that the distinct tokens seen take
            in layers that keep something per token ('-' where none does); states: what is held beyond those bytes, in
            states of all layers that have only a last state (recurrent, window, chunk)
differ      answers that are not equal to the first contender's
best, grid  by arithmetic on the same requests, nothing evicted: resuming anywhere; and only at multiples of 8192, 4
            tokens before the end of prompts and at ends of sequences; + branches: also where earlier requests parted"""


class CacheReport(NamedTuple):
    """All of it. `budget_bytes` bounded each cache, None left them unbounded."""

    workload: Workload
    chunk_tokens: int
    budget_bytes: int | None
    models: list[ModelReport]

    def table(self) -> str:
        """One table per model, and what the columns mean."""
        work = self.workload
        bound = "unbounded" if self.budget_bytes is None else f"{self.budget_bytes:,} bytes each"
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.models[0].counts.items()))
        head = (
            f"{work.requests} requests of {work.agents} agents over {work.systems} system prompts, seed {work.seed}, "
            f"scale {work.scale:g}; caches {bound}; prefill in chunks of {self.chunk_tokens}\n{counts}"
        )
        return "\n\n".join([head, *(model.table() for model in self.models)]) + "\n" + _LEGEND

    @property
    def targets(self) -> list[Target]:
        """Of the trie, for the models that they are about."""
        found = []
        for model in self.models:
            costs = next((row.costs for row in model.contenders if row.name == "trie"), None)
            if costs is None:
                continue
            found.append(Target(f"{model.kind}: answers that differ", costs.mismatches, 0))
            if costs.held_ratio is not None and costs.held_states is None and self.budget_bytes is None:
                what = f"{model.kind}: bytes held over those of the distinct tokens"
                found.append(Target(what, costs.held_ratio, _HELD))
        return found

    def data(self) -> Mapping[str, object]:
        """For JSON."""
        return {
            "workload": asdict(self.workload),
            "chunk_tokens": self.chunk_tokens,
            "budget_bytes": self.budget_bytes,
            "models": [model.data() for model in self.models],
        }

    def plot(self, path: Path) -> None:
        """Draws the picture."""
        from scripts.tools.bench.cache.plot import draw  # matplotlib is there for those who draw

        draw(self.models, path)
