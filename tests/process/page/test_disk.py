"""What the page tells of the disk cache."""

import pytest
from msgspec.structs import replace

from protocol.stats import DiskCounts
from tests.process.page.conftest import Look
from tests.process.page.stand_in import MEGABYTE, STATS, StandIn, node
from tests.process.page.test_page import draws, writing

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_what_is_on_disk_has_a_mark(stand_in: StandIn, look: Look) -> None:
    stand_in.stats = replace(
        STATS,
        disk=DiskCounts(
            state="on", held_bytes=3 * MEGABYTE, budget_bytes=9 * MEGABYTE, restores=1, restored_tokens=500
        ),
        running=[replace(writing(50), restored=500)],
    )
    stand_in.show(
        node(1, None, 0, 800, stored=800, restored=True, pictures=1),
        node(2, 1, 800, 1000, stored=56),
        node(3, 1, 800, 1100, stored=300),
        node(4, 3, 1100, 1400),
    )
    view = await look(stand_in.url)
    await draws(view, 1, 2, 3, 4)
    marks = [view.page.locator(f"[data-key=n{number}] .disk") for number in (1, 2, 3, 4)]
    assert [bool(await mark.get_attribute("d")) for mark in marks] == [True, True, True, False]
    classes = [await mark.get_attribute("class") for mark in marks[:3]]
    assert classes == ["disk restored", "disk part", "disk"]
    told = [str(await view.page.locator(f"[data-key=n{n}]").get_attribute("aria-label")) for n in (1, 2, 3, 4)]
    for words, text in zip((", brought from disk", ", 56 tokens on disk", ", on disk"), told, strict=False):
        assert words in text
    assert "disk" not in told[3]
    await view.page.locator("[data-key=n2]").click()
    assert "On disk\n56 of 200 tokens" in await view.text("#node")
    assert "800 cached (500 from disk)" in await view.text("#requests li")
    totals = await view.text("#totals")
    assert "On disk\n3.0 MB of 9.0 MB" in totals
    assert "From disk\n500 tokens, 1 request" in totals
