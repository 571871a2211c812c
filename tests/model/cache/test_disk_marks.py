"""What the description of a trie says of its nodes: whether they are on disk, and whether they came from there."""

from pathlib import Path

from scripts.tools.models.tiny import tiny
from tests.model.cache.test_disk import Process, words


def told(process: Process) -> dict[tuple[int, int], tuple[int, bool]]:
    """Returns, of each edge, the tokens that are on disk, and whether some of it was restored."""
    return {(node.start, node.end): (node.stored, node.restored) for node in process.cache.nodes()}


def test_nodes_tell_what_is_on_disk_and_what_came_from_there(tmp_path: Path) -> None:
    writer = Process(tiny("llama"), tmp_path)
    writer.ask(words(400))
    assert set(told(writer).values()) == {(0, False)}
    before = writer.cache.describe().mark
    writer.save()
    assert all(mark == (stop - start, False) for (start, stop), mark in told(writer).items())
    assert writer.cache.describe().mark != before  # pages look again

    reader = Process(tiny("llama"), tmp_path)
    reader.restore(words(400))
    assert all(mark == (stop - start, True) for (start, stop), mark in told(reader).items())
    reader.ask([*words(300), 3, 4, 5, *words(60, 7)])  # splits a node
    found = told(reader)
    restored = [span for span, (_, came) in found.items() if came]
    assert max(stop for _, stop in restored) >= 400
    assert 300 in {start for start, _ in restored}
    assert 300 in {stop for _, stop in restored}
    assert [stored for stored, came in found.values() if not came] == [0]
