"""The page in a browser, before a runner that says what a test wants."""

import pytest
import pytest_asyncio
from msgspec.structs import replace

from protocol.stats import (
    CacheCounts,
    DiskCounts,
    DraftCounts,
    DraftModelState,
    EmbeddingCounts,
    MemoryCounts,
    RequestCounts,
    RunningRequest,
    ScoreCounts,
    SliceCounts,
    TokenCounts,
)
from scripts.tools.host.lib import Client, Request
from tests.lib.page_stand_in import MEGABYTE, STATS, StandIn, node
from tests.process.conftest import RANDOM, SpawnModel
from tests.process.page.conftest import Look, View

pytestmark = pytest.mark.asyncio(loop_scope="session")

TRIE = (
    node(1, None, 0, 800, live=True, locks=1),
    node(2, 1, 800, 1000, live=True, locks=1),
    node(3, 1, 800, 1100, idle=3),
)
"""The prefix that two conversations share, and the rest of each."""
SHIFTS = """() => {
  window.shifts = [];
  const moved = ({node, previousRect: from, currentRect: to}) =>
    from.top !== to.top ? [`${node?.id || node?.className || node?.nodeName}: ${from.top} to ${to.top}`] : [];
  const note = entry => window.shifts.push(...entry.sources.flatMap(moved));
  new PerformanceObserver(list => list.getEntries().forEach(note)).observe({type: "layout-shift"});
}"""
"""Whatever moves up or down; a number that grows to the left does not count."""
UNREADABLE = """() => {
  const light = rgb => rgb.map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const behind = element => {
    const colour = numbers(getComputedStyle(element).backgroundColor);
    return colour.length === 3 || colour[3] > 0 ? colour : behind(element.parentElement);
  };
  const bad = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some(child => child.nodeType === 3 && child.data.trim());
    if (!own || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const text = light(numbers(element.closest("svg") ? style.fill : style.color).slice(0, 3));
    const ground = light(behind(element.closest("svg")?.parentElement ?? element).slice(0, 3));
    const contrast = (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
    if (contrast < 4.5) bad.push(`${element.textContent}: ${contrast.toFixed(2)}`);
  }
  return bad;
}"""
"""Texts with less contrast than the accessibility guidelines want (WCAG 2, level AA)."""


def writing(generated: int, number: int = 7) -> RunningRequest:
    """A request that has been answered so far."""
    return RunningRequest(
        number=number, phase="decode", prompt=1000, cached=800, prefilled=1000, generated=generated, max_tokens=200,
        age_s=1.0 + generated / 10, tokens_per_s=10.0, ttft_s=0.95,
    )  # fmt: skip


def bar(number: int) -> str:
    """The visible edge of a node."""
    return f"[data-key=n{number}] .frame"


async def draws(view: View, *numbers: int) -> None:
    for number in numbers:
        await view.page.locator(bar(number)).wait_for()


async def test_the_page_shows_the_numbers_of_the_runner(stand_in: StandIn, look: Look) -> None:
    stand_in.stats = replace(
        STATS,
        path="/models/demo",
        ttft_s=1.04,
        requests=RequestCounts(running=1, queued=1, done=5, cancelled=2),
        tokens=TokenCounts(prompt=4000, cached=3000, recomputed=1000, generated=1234),
        slices=SliceCounts(prefill_tokens=1000, prefill_s=0.5, decode_s=20.0),
        scores=ScoreCounts(rows=12, tokens=2400, cached=1100),
        embeddings=EmbeddingCounts(texts=64, tokens=640, forwards=2),
        cache=CacheCounts(
            nodes=3, held_bytes=MEGABYTE, budget_bytes=4 * MEGABYTE, misses={"window_passed": 9, "new_one": 1}
        ),
        memory=MemoryCounts(used_bytes=21 * MEGABYTE, peak_bytes=35 * MEGABYTE, budget_bytes=40 * MEGABYTE),
        drafts=DraftCounts(
            drafted={"own": 320, "path": 69, "model": 20, "known": 7},
            accepted={"own": 300, "path": 21, "model": 11, "known": 7},
            state="on",
            model=DraftModelState(name="small:latest", bytes=0, state="resting", why="slower"),
        ),
        disk=DiskCounts(
            state="on", held_bytes=3 * MEGABYTE, budget_bytes=9 * MEGABYTE, restores=1, restored_tokens=500
        ),
        running=[
            replace(writing(50), restored=500),
            RunningRequest(number=8, phase="queued", prompt=12_000, max_tokens=9, age_s=3.0),
        ],
    )  # fmt: skip
    view = await look(stand_in.url)
    assert await view.page.title() == "demo:latest · mlx-runner"
    assert [await view.text(selector) for selector in (
        "#model", "#about", "#hits .value", "#memory .value", "#memory .note", "#speed .note", "#requests-note",
        "#cache-note",
    )] == [
        "demo:latest",
        "mlx-runner 0.1.0 · LlamaForCausalLM · CPU · context of 4,096 tokens · cache trie · /models/demo",
        "75 %", "21.0 MB", "of 40.0 MB; peak 35.0 MB", "last answer began after 1.0 s", "1 of 4 running, 1 waiting",
        "3 nodes, 1.0 MB of 4.0 MB",
    ]  # fmt: skip
    names, values = [await view.page.locator(f"#totals {each}").all_inner_texts() for each in ("dt", "dd")]
    assert dict(zip(names, values, strict=True)) == {
        "Answered": "5",
        "Cancelled": "2",
        "Prompts": "4,000 tokens",
        "From the cache": "3,000 tokens",
        "Computed": "1,000 tokens",
        "Prompt speed": "2,000 tokens/s",
        "Generated": "1,234 tokens",
        "Answer speed": "61.7 tokens/s",
        "Scores": "12 rows of 2,400 tokens, 1,100 cached",
        "Embeddings": "64 texts of 640 tokens in 2 forwards",
        "Drafts": "321 of 389 tokens right",
        "Draft model": "11 of 20 tokens right, resting now",
        "Known first tokens": "7",
        "On disk": "3.0 MB of 9.0 MB",
        "From disk": "500 tokens, 1 request",
        "Cache, live": "0 B, 0 B running",
        "Cache, paged out": "0 B, 0 B checkpoints",
        "Weights": "0 B",
        "MLX's reserve": "0 B",
        "Miss: outside a sliding window": "9",
        "Miss: new one": "1",
    }, "of the whole run; what never happened takes no room"
    assert [" ".join(each.split()) for each in await view.page.locator("#requests li").all_inner_texts()] == [
        "#7 answering 6.0 s 1,000 prompt tokens, 800 cached (500 from disk)"
        " 50 of 200, 10.0 tokens/s, first after 0.95 s",
        "#8 waiting 3.0 s 12,000 prompt tokens",
    ]


async def test_nothing_is_claimed_before_the_first_numbers(stand_in: StandIn, look: Look) -> None:
    stand_in.silent = True
    view = await look(stand_in.url, state="connecting …")
    assert (await view.page.locator("body").inner_text()).split() == ["mlx-runner", "connecting", "…"]
    stand_in.tell(STATS)
    await view.until("#state-word", "live")
    assert await view.text("#requests-note") == "0 of 4 running, 0 waiting"
    assert await view.text("#picture") == "", "the cache is not known yet"
    stand_in.show()
    await view.until("#picture", "The cache is empty")
    assert not await view.page.locator(".of-disk, .of-media").filter(visible=True).count(), "keys of what it has not"


async def test_a_list_that_is_cut_off_has_a_shadow_there(stand_in: StandIn, look: Look) -> None:
    stand_in.stats = replace(STATS, running=[writing(1, number) for number in range(9)])
    view = await look(stand_in.url)
    left, top, width, height = await view.box(".requests")
    await view.page.evaluate("document.getElementById('requests').style.visibility = 'hidden'")
    edges = []
    for to in (0, 50, 5000):
        await view.page.evaluate(f"document.querySelector('.requests').scrollTop = {to}")
        for edge in (top, top + height - 4):
            clip = {"x": left + 40, "y": edge, "width": width - 80, "height": 4}
            edges.append(await view.page.screenshot(clip=clip))
    plain, below, above = edges[0], edges[1], edges[4]
    assert len({plain, below, above}) == 3
    assert edges == [plain, below, above, below, above, plain]


@pytest_asyncio.fixture(loop_scope="session")
async def trie(stand_in: StandIn, look: Look) -> View:
    """A page that has drawn the trie."""
    stand_in.show(*TRIE)
    view = await look(stand_in.url)
    await draws(view, 1, 2, 3)
    return view


async def test_two_branches_are_drawn_after_their_shared_prefix(trie: View) -> None:
    view = trie
    assert await view.page.locator("#picture [role=treeitem]").count() == 3
    left, top, width, height = await view.box(bar(1))
    for number in (2, 3):
        child_left, _, child_width, child_height = await view.box(bar(number))
        assert child_left > left + width
        assert child_width < width, "fewer tokens"
        assert child_height < height, "fewer bytes"
    tops = [(await view.box(bar(number)))[1] for number in (2, 3)]
    assert tops[0] < top + height < tops[1], "one goes straight on, the other below it"
    assert await view.page.locator(".turns path").count() == 3, "a way to each, that of the first from the root"


async def test_it_follows_a_generation_and_nothing_moves_away(stand_in: StandIn, look: Look) -> None:
    view = await look(stand_in.url)
    stand_in.tell(replace(STATS, running=[writing(1)]))
    await view.until("#requests", "1 of 200")
    await view.page.evaluate(SHIFTS)
    widths = []
    for generated in range(20, 201, 60):
        stand_in.tell(replace(
            STATS,
            uptime_s=1 + generated,
            requests=RequestCounts(running=generated // 20),
            tokens=TokenCounts(prompt=10 * generated, cached=9 * generated, generated=generated),
            running=[writing(generated, 7 + other) for other in range(generated // 20)],
        ))  # fmt: skip
        stand_in.show(*TRIE[: 1 + generated // 80])
        await view.until("#requests", f"{generated} of 200")
        widths.append((await view.box("#requests .written"))[2])
    await draws(view, 1, 2, 3)
    assert widths == sorted(set(widths))
    stand_in.tell(replace(STATS, uptime_s=300.0, tokens=TokenCounts(generated=200)))
    await view.until("#requests-none", "No request is running.")
    assert await view.page.locator("#requests li").count() == 0
    await view.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert await view.page.evaluate("window.shifts") == []


async def test_the_end_and_the_return_of_the_runner_are_shown(stand_in: StandIn, look: Look) -> None:
    stand_in.stats = replace(STATS, uptime_s=500.0, memory=MemoryCounts(used_bytes=21 * MEGABYTE))
    stand_in.show(*TRIE)
    view = await look(stand_in.url)
    await draws(view, 3)
    await view.page.locator("[data-key=n3]").click()
    view.loses = True
    await stand_in.end()
    await view.until("#ended", "The runner ended at ")
    assert await view.text("#state-word") == "ended"
    assert await view.text("#memory .value") == "21.0 MB", "the last state stays"
    await draws(view, 1, 2, 3)
    assert await view.page.locator("#ended[role=status]").is_visible()

    stand_in.stats = replace(STATS, model="another:latest", memory=MemoryCounts(used_bytes=7 * MEGABYTE))
    stand_in.show(node(3, None, 0, 50))
    await stand_in.begin()
    await view.until("#model", "another:latest")
    assert await view.text("#state-word") == "live"
    assert not await view.page.locator("#ended").is_visible()
    assert await view.text("#memory .value") == "7.0 MB"
    await view.until_true("document.querySelectorAll('.edge').length === 1")
    assert await view.page.locator(".chosen").count() == 0, "a node of another runner that is called the same"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1240])
async def test_it_fits_and_can_be_read(scheme: str, width: int, stand_in: StandIn, look: Look) -> None:
    stand_in.stats = replace(
        STATS,
        model="a-publisher-with-a-name/a-model-with-a-very-long-name-indeed:30b-a3b-instruct-2511-q4_K_M",
        requests=RequestCounts(running=1),
        running=[
            writing(50, number=123_456),
            RunningRequest(number=8, phase="prefill", prompt=120_000, prefilled=70_000),
        ],
        cache=CacheCounts(budget_bytes=8 * 10**9, misses={"non_trimmable_divergence": 12_345}),
        memory=MemoryCounts(used_bytes=123 * 10**9, peak_bytes=130 * 10**9, budget_bytes=140 * 10**9),
    )  # fmt: skip
    chain = [node(number, number - 1 or None, 10 * number, 10 * number + 10) for number in range(1, 60)]
    words = "Wörter " * 9
    stand_in.show(*chain, node(60, None, 0, 900, text=words), node(61, 60, 900, 2000, text=words))
    view = await look(stand_in.url, width=width, scheme=scheme)
    await draws(view, 1, 60)
    await view.page.locator("[data-key=n60]").click()
    assert await view.number("document.documentElement.scrollWidth") == width
    assert await view.page.evaluate(UNREADABLE) == []
    background = await view.page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
    assert (int(background) < 64) == (scheme == "dark")


async def test_received_text_is_never_markup(stand_in: StandIn, look: Look) -> None:
    evil = '<img src=x onerror="alert(1)">'
    stand_in.stats = replace(STATS, model=evil, architecture=evil, cache=CacheCounts(misses={evil: 1}))
    stand_in.show(node(1, None, 0, 3000, text=f"{evil}\u202e\n\x00"))
    view = await look(stand_in.url)
    await draws(view, 1)
    await view.page.locator("[data-key=n1]").click()
    assert await view.text("#model") == evil
    assert await view.text("#node-text") == f"“{evil}·⏎·”"
    assert await view.page.locator("img, script:not([src='/page/main.js'])").count() == 0


async def test_a_clicked_node_shows_its_details(stand_in: StandIn, trie: View) -> None:
    view = trie
    assert await view.text("#node-name") == "No node selected"
    await view.page.locator("[data-key=n1]").click()
    assert await view.text("#node-name") == "800 tokens, 800.0 KB"
    assert "--inspect-text" in await view.text("#node-text")
    details = await view.text("#node")
    for row in ("0 to 800", "12 of 12, 800.0 KB", "1 request", "2 branches", "3 nodes, 1.3 MB"):
        assert row in details
    stand_in.show(replace(TRIE[0], locks=0, idle_uses=5), TRIE[1])
    await view.until("#node", "5 uses ago")
    stand_in.show(TRIE[2])
    await view.until("#node-name", "The node no longer exists")


async def test_the_picture_is_walked_with_the_keyboard(stand_in: StandIn, trie: View) -> None:
    view = trie
    focused = "document.activeElement.dataset.key"
    await view.page.locator("[data-key=n1]").focus()
    for key, at in (("ArrowRight", "n2"), ("ArrowDown", "n3"), ("ArrowLeft", "n1"), ("End", "n3"), ("Home", "n1")):
        await view.page.keyboard.press(key)
        assert await view.page.evaluate(focused) == at
        assert await view.page.locator("#picture [tabindex='0']").get_attribute("data-key") == at
    await view.page.keyboard.press("End")
    await view.page.keyboard.press("Enter")
    assert await view.text("#node-name") == "300 tokens, 300.0 KB"
    stand_in.show(node(0, None, 0, 5), *TRIE)
    await draws(view, 0)
    assert await view.page.evaluate(focused) == "n3", "it stays where it was when the picture changes"
    assert await view.page.locator("[aria-selected=true]").get_attribute("data-key") == "n3"


async def test_everything_shown_has_an_accessible_name(trie: View) -> None:
    view = trie
    named = await view.page.evaluate(
        """() => [...document.querySelectorAll("[role=img], [role=tree], [role=treeitem], [role=region], section")]
            .map(each => each.getAttribute("aria-label") ??
                 document.getElementById(each.getAttribute("aria-labelledby"))?.textContent ?? "")"""
    )
    assert len(named) == 3 + 1 + 3 + 3 + 4
    assert all(named)
    assert "tokens 800 to 1,100, 300.0 KB" in named
    items = "[...document.querySelectorAll('[role=treeitem]')]"
    assert await view.page.evaluate(f"{items}.map(each => each.getAttribute('aria-level'))") == ["1", "2", "2"]


async def test_two_thousand_nodes_are_few_marks_and_can_be_opened(stand_in: StandIn, look: Look) -> None:
    """1,000 conversations with one answer each, the last of which are the largest."""
    pairs = ((node(2 * i, None, 0, 10 + i), node(2 * i + 1, 2 * i, 10 + i, 20 + i)) for i in range(1000))
    stand_in.show(*(each for pair in pairs for each in pair))
    view = await look(stand_in.url, width=360)
    await draws(view, 1998, 1999)
    marks = view.page.locator("#picture [role=treeitem]")
    shown = await view.page.locator("#picture .edge").count()
    assert 40 <= shown <= 80
    rest = view.page.locator("#picture .more")
    assert await rest.count() == 1
    assert "960 more, " in str(await rest.get_attribute("aria-label"))
    await rest.focus()
    await view.page.keyboard.press("Enter")
    await view.until("#picture .more", "940 more, ")
    assert await view.page.locator("#picture .edge").count() == shown + 40
    assert await view.page.evaluate("document.activeElement.dataset.key"), "the first of the new ones has the focus"
    assert await marks.count() < 200


async def test_a_real_trie_is_drawn_with_its_two_branches(start: SpawnModel, look: Look) -> None:
    process = start(RANDOM)
    view = await look(f"http://127.0.0.1:{process.port}/")
    assert await view.text("#model") == RANDOM
    async with Client.of(process) as client:
        for end in ("Then one goes left.", "And the other goes right."):
            await client.complete(Request(f"All that both of them share comes first. {end}", {"num_predict": 8}))
    await view.until_true("document.querySelectorAll('.edge').length >= 3")
    levels = await view.page.evaluate("[...document.querySelectorAll('.edge')].map(each => each.ariaLevel)")
    assert (levels.count("1"), levels.count("2")) == (1, 2)
    await view.until("#totals", "Answered2")


async def test_what_is_on_disk_has_a_mark(stand_in: StandIn, look: Look) -> None:
    stand_in.stats = replace(STATS, disk=DiskCounts(state="on"))
    whole = node(1, None, 0, 800, stored=800, restored=True, media=1)
    stand_in.show(whole, node(2, 1, 800, 1000, stored=56), node(3, 1, 800, 1100, stored=300), node(4, 3, 1100, 1400))
    view = await look(stand_in.url)
    await draws(view, 1, 2, 3, 4)
    marks = {1: ("disk restored", "brought from disk"), 2: ("disk part", "56 tokens on disk"), 3: ("disk", ", on disk")}
    for number, (kind, words) in marks.items():
        mark = view.page.locator(f"[data-key=n{number}] .disk")
        assert (await mark.get_attribute("class"), bool(await mark.get_attribute("d"))) == (kind, True)
        assert words in str(await view.page.locator(f"[data-key=n{number}]").get_attribute("aria-label"))
    assert not await view.page.locator("[data-key=n4] .disk").get_attribute("d")
    assert "disk" not in str(await view.page.locator("[data-key=n4]").get_attribute("aria-label"))
    assert await view.page.locator(".of-disk, .of-media").filter(visible=True).count() == 4
    await view.page.locator("[data-key=n2]").click()
    assert "On disk\n56 of 200 tokens" in await view.text("#node")
