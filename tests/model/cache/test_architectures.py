"""The trie cache over every architecture of the installed mlx-lm: what comes out of it equals a run without a cache.

The numbered scenarios are those of docs/internals/cache.md, section 8.
"""

import re
from pathlib import Path

import pytest

import runner.process.lean_mlx_lm  # noqa: F401

import mlx_lm.models  # isort: skip

from runner.cache import make_cache
from runner.cache.interface import Cache
from scripts.tools.models.architectures import BOUNDARY_DEPENDENT, architectures, build, unserved
from scripts.tools.models.tiny import VOCAB, Tiny, words
from tests.lib.driver import ask, ask_uncached, check_equal, forwards_at_once, largest

SERVED = tuple(name for name in architectures() if name not in unserved())
every_architecture = pytest.mark.parametrize("name", SERVED)


PROMPT = words(41, seed=1)  # longer than the windows and chunks of all models
BACK = [*PROMPT, *words(12, seed=3)]
EDITED = [*PROMPT, *words(9, seed=5)]


@every_architecture
def test_a_prompt_comes_back_from_the_cache_after_another(name: str) -> None:  # scenario 48
    tiny = build(name)
    _check_sensitive(tiny)
    _check_served(tiny, make_cache("trie", tiny.make_layers))


@pytest.mark.slow
@every_architecture
def test_a_prompt_comes_back_where_no_class_of_layers_is_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with the generic adapter alone."""  # scenario 46
    monkeypatch.setattr("runner.cache.layers._ADAPTERS", {})
    tiny = build(name)
    _check_served(tiny, make_cache("trie", tiny.make_layers))


def test_no_architecture_is_left_out() -> None:
    """Every source file of mlx-lm's models that begins a class of the name is in the list."""
    sources = [path for folder in mlx_lm.models.__path__ for path in Path(folder).glob("*.py")]
    models = {path.stem for path in sources if re.search(r"^class Model\(", path.read_text(), re.MULTILINE)}
    assert models
    assert models <= set(architectures())


@pytest.mark.parametrize("name", sorted(unserved()))
def test_what_cannot_run_is_known(name: str) -> None:
    """All others are served above; once one of these runs, it has to leave the table."""
    with pytest.raises(Exception, match=re.escape(unserved()[name])):
        ask_uncached(build(name), PROMPT, say=0)


@pytest.mark.parametrize("name", sorted(BOUNDARY_DEPENDENT))
def test_the_answers_of_some_depend_on_the_boundaries_of_the_forwards(name: str) -> None:
    """Without any cache. They are served token by token above; once this fails, they need not be."""
    tiny = build(name)
    at_once, in_chunks = forwards_at_once(tiny, BACK, [53])[-1], forwards_at_once(tiny, BACK, [45, 8])[-1]
    assert largest(at_once - in_chunks) > 10 * tiny.tolerance


def _check_served(tiny: Tiny, cache: Cache) -> None:
    """41 tokens, 30 foreign ones, and back twice with two different ends."""
    chunk = 1 if tiny.name in BOUNDARY_DEPENDENT else 16
    ask(tiny, cache, PROMPT, say=0, chunk=chunk)
    foreign = ask(tiny, cache, words(30, seed=2), say=0, chunk=chunk)
    assert foreign.session.cached == 0
    back = ask(tiny, cache, BACK, say=8, chunk=chunk)
    assert (back.session.matched, back.session.cached) == (41, 41)
    check_equal(tiny, back, ask_uncached(tiny, BACK, say=8, chunk=chunk))
    edited = ask(tiny, cache, EDITED, say=1, chunk=chunk)
    assert (edited.session.matched, edited.session.cached) == (41, 41)
    check_equal(tiny, edited, ask_uncached(tiny, EDITED, say=1, chunk=chunk))


def _check_sensitive(tiny: Tiny) -> None:
    """The control: another first token changes what comes after all of them."""
    one, other = (
        forwards_at_once(tiny, [first, *BACK[1:]], [len(BACK)])[-1] for first in (BACK[0], (BACK[0] + 1) % VOCAB)
    )
    assert largest(one - other) > 10 * tiny.tolerance
