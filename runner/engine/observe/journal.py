"""What is noted of requests while they go by: counted, and said in the log."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from runner.engine import lifecycle
from runner.engine.observe.counters import Counters
from runner.engine.observe.progress import PrefillProgress, Reading
from runner.engine.queue import RequestQueue
from runner.engine.request import Request
from runner.logs import Log
from runner.terminal import STATUS_LINE

if TYPE_CHECKING:
    from runner.engine.generation import Generation

log = Log(__name__)
_BAR = 20


class Journal:
    """Owner: the engine thread, which tells it what happens."""

    def __init__(
        self,
        waiting: RequestQueue,
        prefills: PrefillProgress | None = None,
        show: Callable[[str], bool] = STATUS_LINE.show,
    ) -> None:
        """`waiting` are those that have no session yet. `show` puts a line below the log, or returns False where there
        is no such place."""
        self.waiting = waiting
        self.counters = Counters()
        self._prefills = prefills or PrefillProgress()
        self._show = show

    def began(self, generation: "Generation") -> None:
        """It has its session."""
        session = generation.session
        self.counters.began(generation)
        self._prefills.begin(generation.request.number, session.total, session.cached)

    def prefilled(self, generation: "Generation") -> None:
        """A part of its prompt was computed."""
        number = generation.request.number
        reading = self._prefills.passed(number, generation.session.position)
        if reading is not None:
            self._say(reading)
        elif not generation.left:
            self._read(number)

    def ended(self, generation: "Generation") -> None:
        """It is closed."""
        self._read(generation.request.number)
        lifecycle.report(generation.request, generation.session, self.counters.ended(generation))

    def never_began(self, requests: Sequence[Request], outcome: str) -> None:
        """They ended before they had a session."""
        for request in requests:
            self.counters.never_began(request, outcome)

    def _read(self, number: int) -> None:
        if self._prefills.end(number):
            self._show("")

    def _say(self, reading: Reading) -> None:
        if not self._show(bar(reading)):
            log.info(
                "prefill",
                request=reading.request,
                percent=reading.percent,
                done=reading.done,
                total=reading.total,
                tokens_per_s=round(reading.tokens_per_s, 1),
                seconds_left=round(reading.seconds_left, 1),
            )


def bar(reading: Reading) -> str:
    """`prefill 7 [#####               ] 25 %  512 tokens/s  12 s left`, the number being that of the request."""
    full = _BAR * reading.done // max(1, reading.total)
    blocks = f"[{'#' * full:<{_BAR}}]"
    rates = f"{reading.tokens_per_s:.0f} tokens/s  {reading.seconds_left:.0f} s left"
    return f"prefill {reading.request} {blocks} {reading.percent:>2} %  {rates}"
