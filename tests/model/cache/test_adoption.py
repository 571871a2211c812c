"""What is adopted from disk joins what memory holds, at the right depth and not without what it follows."""

from array import array
from pathlib import Path

from runner.cache.adoption import adopt, standing
from runner.cache.disk.reader import Wanted
from scripts.tools.models.tiny import tiny
from tests.lib.driver import ask_uncached, check_equal
from tests.model.cache.test_disk import Process, words


def test_memory_may_hold_the_beginning_of_a_segment(tmp_path: Path) -> None:
    """The segment begins at 256, and memory parts from the prompt at 300."""
    model, prompt = tiny("llama"), words(700)
    writer = Process(model, tmp_path)
    writer.ask(prompt)
    writer.save()
    reader = Process(model, tmp_path)
    reader.ask([*prompt[:300], *words(40, 7)])
    assert reader.restore(prompt) == 699
    check_equal(model, reader.ask(prompt), ask_uncached(model, prompt, chunk=32))


def test_a_segment_is_not_adopted_without_what_it_follows(tmp_path: Path) -> None:
    writer = Process(tiny("llama"), tmp_path)
    prompt = words(700)
    writer.ask(prompt)
    writer.save()
    reader = Process(tiny("llama"), tmp_path)
    wanted = Wanted(array("i", prompt), "", 0, lambda at: at - 1, reader.layers)
    first, second, *_ = reader.reader.read(wanted)
    assert not adopt(reader.cache, second.prefix, "", second.segment)
    assert standing(reader.cache, wanted.tokens, "") == 0
    assert reader.cache.describe().snapshots == 0
    for found in (first, second):
        assert adopt(reader.cache, found.prefix, "", found.segment)
    assert standing(reader.cache, wanted.tokens, "") == 512
