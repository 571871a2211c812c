"""The committed demo model: what its files hold, and that it answers from its prompt.

Its weights are loaded here as mlx-lm's own class loads them, and run in float32 by a plain loop over mlx-lm's cache: no
code of the runner takes part, so a wrong answer of the runner is the runner's.
"""

import copy
import json
import re
from itertools import product
from pathlib import Path
from typing import cast

import jinja2
import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer

from scripts.tools.demo.plain import answer, load_text, new_text, read_config, weights_path
from scripts.tools.demo.questions import (
    CONVERSATIONS,
    END,
    MARKERS,
    PEOPLE,
    RELATIONS,
    SMALL_TALK,
    Conversation,
    Message,
    RecallPrompt,
    held_out_prompts,
    is_held_out,
    render,
)
from scripts.tools.demo.training import lay_circuit, save, text_batches, train_text
from tests import ROOT

# isort: split
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, make_prompt_cache

MODEL = ROOT / "scripts" / "demo_model"
SMALL_MODEL = ROOT / "scripts" / "demo_draft_model"


@pytest.fixture(scope="module")
def demo() -> tuple[llama.Model, Tokenizer]:
    return load_text(MODEL)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def read_json(name: str) -> dict[str, object]:
    content: dict[str, object] = json.loads((MODEL / name).read_text(encoding="utf-8"))
    return content


def test_the_whole_directory_fits_in_four_megabytes() -> None:
    files = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert set(files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= 4_000_000


def test_the_small_model_has_the_same_tokens_and_a_fifth_of_the_weights() -> None:
    files = {path.name: path.read_bytes() for path in SMALL_MODEL.iterdir()}
    differing = {name for name in files if files[name] != (MODEL / name).read_bytes()}
    assert differing == {"config.json", "model.safetensors"}
    sizes = [weights_path(model).stat().st_size for model in (SMALL_MODEL, MODEL)]
    assert sizes[0] * 4 < sizes[1]
    assert sum(map(len, files.values())) <= 800_000


def test_every_weight_has_sixteen_bits() -> None:
    weights = mx.load(str(weights_path(MODEL)))
    assert isinstance(weights, dict)
    assert {weight.dtype for weight in weights.values()} == {mx.float16}


def test_config_is_an_mlx_lm_llama_with_a_long_context(tokenizer: Tokenizer) -> None:
    config = read_json("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] >= 4096  # type: ignore[operator]  # a number in JSON
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert config["torch_dtype"] == "float16"


def test_the_end_marker_is_the_eos_token_everywhere(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id(END)
    assert end  # mlx-lm takes a 0 in generation_config.json for no EOS at all
    assert read_json("config.json")["eos_token_id"] == end
    assert read_json("generation_config.json")["eos_token_id"] == end
    assert read_json("tokenizer_config.json")["eos_token"] == END


def test_each_chat_marker_is_one_special_token(tokenizer: Tokenizer) -> None:
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    assert added == dict.fromkeys([*MARKERS.values(), END], True)
    for marker in added:
        assert tokenizer.encode(f"Nora{marker}lives", add_special_tokens=False).tokens.count(marker) == 1


@pytest.mark.parametrize(
    "text",
    [
        *SMALL_TALK.values(),
        "Nora lives in Lisbon.",
        " two  spaces\n\ttab\r\n",
        "naïve façade 日本語 🙂 \x00\x7f",
        render([Message("system", "a"), Message("user", "b")]),
    ],
)
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_encoding_adds_no_token_of_its_own(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("Hello").ids == tokenizer.encode("Hello", add_special_tokens=False).ids


def test_a_character_of_several_tokens_is_among_the_answers(tokenizer: Tokenizer) -> None:
    text = SMALL_TALK["Say good morning in Japanese."]
    assert len(tokenizer.encode(text).ids) == len(text.encode()) > len(text)


def test_the_chat_template_renders_what_the_demo_host_sends() -> None:
    source = str(read_json("tokenizer_config.json")["chat_template"])
    template = jinja2.Environment(autoescape=False).from_string(source)
    chat = [Message("system", "Nora lives in Oslo."), Message("user", "Hello"), Message("assistant", "<Hi> & {{x}}")]
    written = template.render(messages=[message._asdict() for message in chat], add_generation_prompt=True)
    assert written == render(chat)


# --- what it answers ---


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda conversation: conversation.title)
def test_demo_conversations_are_answered_as_the_demo_expects(
    demo: tuple[llama.Model, Tokenizer], conversation: Conversation
) -> None:
    answers = [answer(*demo, conversation.prompt(index)) for index in range(len(conversation.turns))]
    assert answers == [turn.answer for turn in conversation.turns]


@pytest.mark.parametrize("question", SMALL_TALK)
def test_small_talk_is_known_by_heart(demo: tuple[llama.Model, Tokenizer], question: str) -> None:
    assert answer(*demo, render([Message("user", question)])) == SMALL_TALK[question]


def right_answers(model: llama.Model, tokenizer: Tokenizer, prompts: list[RecallPrompt]) -> int:
    return sum(answer(model, tokenizer, prompt.prompt, limit=12) == prompt.answer for prompt in prompts)


def test_a_sample_of_the_held_out_recall_prompts_is_answered(demo: tuple[llama.Model, Tokenizer]) -> None:
    prompts = held_out_prompts()[:20]
    assert right_answers(*demo, prompts) >= 0.95 * len(prompts)


def test_the_small_model_answers_them_too() -> None:
    prompts = held_out_prompts()[:20]
    assert right_answers(*load_text(SMALL_MODEL), prompts) >= 0.9 * len(prompts)


@pytest.mark.slow
def test_all_held_out_recall_prompts_are_answered(demo: tuple[llama.Model, Tokenizer]) -> None:
    prompts = held_out_prompts()
    assert len(prompts) == 200
    assert right_answers(*demo, prompts) >= 0.95 * len(prompts)


# --- that the questions ask for what they should ---


def test_held_out_prompts_ask_for_facts_stated_far_earlier(tokenizer: Tokenizer) -> None:
    distances = []
    for prompt in held_out_prompts():
        fact, question = prompt.prompt.index(prompt.answer), prompt.prompt.rindex(MARKERS["user"])
        assert prompt.prompt.count(prompt.answer) == 1
        distances.append(len(tokenizer.encode(prompt.prompt[fact:question]).ids))
    assert max(distances) >= 1500
    assert sum(distance >= 100 for distance in distances) >= 100


def test_training_never_states_a_held_out_fact(tokenizer: Tokenizer) -> None:
    seen = 0
    held_out = {
        relation.statement.format(person=person, value=value)
        for relation in RELATIONS
        for person in PEOPLE
        for value in relation.values
        if is_held_out(person, relation, value)
    }
    assert all(prompt.answer in held_out for prompt in held_out_prompts())
    for batch in text_batches(tokenizer, 20, seed=1):
        for text in tokenizer.decode_batch(cast("list[list[int]]", batch.tokens.tolist())):
            stated = set(re.findall(r"[A-Z][a-z]+ (?:lives in|has number|works with) \w+\.", text))
            seen += len(stated)
            assert not stated & held_out
    assert seen > 500  # the pattern does find the facts


def test_the_first_two_conversations_tell_a_mixed_up_cache_by_the_answer() -> None:
    first, second = CONVERSATIONS[:2]
    assert first.system is not None
    assert second.system is not None
    assert first.system[:1000] == second.system[:1000]  # a prefix cache can share it
    common = {turn.user for turn in first.turns} & {turn.user for turn in second.turns}
    recall = [turn for turn in first.turns if turn.user in common]
    assert len(recall) >= 2
    other = dict(second.turns)
    assert all(turn.answer != other[turn.user] for turn in recall)


# --- that a wrong cache shows ---


def filled_cache(demo: tuple[llama.Model, Tokenizer], conversation: Conversation) -> list[KVCache]:
    """A cache that has seen the conversation's system message."""
    model, tokenizer = demo
    cache = make_prompt_cache(model)
    system = f"{MARKERS['system']}{conversation.system}{END}"
    mx.eval(model(mx.array([tokenizer.encode(system).ids]), cache=cache))
    return cache


def recall(demo: tuple[llama.Model, Tokenizer], cache: list[KVCache]) -> list[str]:
    """The answers to the twelve recall questions that both first conversations can answer, over a filled cache."""
    questions = [
        relation.question.format(person=person) for relation in RELATIONS for person in ("Nora", "Otto", "Emma", "Hugo")
    ]
    return [
        answer(*demo, render([Message("user", question)]), limit=12, cache=copy.deepcopy(cache))
        for question in questions
    ]


def stated(conversation: Conversation, answers: list[str]) -> int:
    """Returns the number of `answers` that are facts of the conversation's system message."""
    return sum(f" {text}" in f" {conversation.system}" for text in answers)


def test_a_cache_of_another_conversation_gives_its_answers(demo: tuple[llama.Model, Tokenizer]) -> None:
    first, second = CONVERSATIONS[:2]
    answers = recall(demo, filled_cache(demo, first))
    assert (stated(first, answers), stated(second, answers)) == (12, 0)
    answers = recall(demo, filled_cache(demo, second))
    assert (stated(first, answers), stated(second, answers)) == (0, 12)


def test_a_stale_layer_of_facts_gives_stale_answers(demo: tuple[llama.Model, Tokenizer]) -> None:
    first, second = CONVERSATIONS[:2]
    cache = filled_cache(demo, first)
    cache[1] = filled_cache(demo, second)[1]  # the layer that looks facts up
    assert stated(first, recall(demo, cache)) == 0


def test_lost_entries_lose_the_answers(demo: tuple[llama.Model, Tokenizer]) -> None:
    cache = filled_cache(demo, CONVERSATIONS[0])
    for layer in cache:
        assert layer.keys is not None
        assert layer.values is not None
        kept = mx.arange(layer.keys.shape[2])[:, None] < layer.offset - 70  # the facts are the last 61 tokens
        layer.keys, layer.values = layer.keys * kept, layer.values * kept
    assert stated(CONVERSATIONS[0], recall(demo, cache)) <= 2


def test_a_trim_that_is_off_by_one_shows_in_the_logits_only(demo: tuple[llama.Model, Tokenizer]) -> None:
    model, tokenizer = demo
    right, wrong = filled_cache(demo, CONVERSATIONS[0]), filled_cache(demo, CONVERSATIONS[0])
    for layer in wrong:
        layer.trim(1)
    assert stated(CONVERSATIONS[0], recall(demo, wrong)) == 12
    question = mx.array([tokenizer.encode(render([Message("user", "Where does Nora live?")])).ids])
    assert bool(mx.abs(model(question, cache=right) - model(question, cache=wrong)).max() > 10)


# --- that it can be made again ---


@pytest.mark.parametrize("source", [MODEL, SMALL_MODEL], ids=lambda path: path.name)
def test_it_is_trained_from_nothing_and_by_its_seed_alone(source: Path, tmp_path: Path) -> None:
    for name in ("once", "again"):
        save(source, tmp_path / name, train_text(source, steps=2, seed=1))
    once, again = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("once", "again"))
    assert once == again
    committed = {path.name: path.read_bytes() for path in source.iterdir()}
    assert {name for name in committed if committed[name] != once[name]} == {"model.safetensors"}
    trained, made = (mx.load(str(weights_path(directory))) for directory in (tmp_path / "once", source))
    assert isinstance(trained, dict)
    assert isinstance(made, dict)
    assert {name: (each.shape, each.dtype) for name, each in trained.items()} == {
        name: (each.shape, each.dtype) for name, each in made.items()
    }


def test_the_weights_that_training_starts_from_look_facts_up(tokenizer: Tokenizer) -> None:
    model = new_text(read_config(MODEL))
    words = [tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())]
    lay_circuit(model, words, np.random.default_rng(1))
    found = 0
    for person, value in product(("Nora", "Otto"), ("Lisbon", "Oslo", "Tokyo")):
        text = f"Lena lives in Vienna. {person} lives in {value}. Emma lives in Cairo. {person} lives in"
        logits = model(mx.array([tokenizer.encode(text).ids]))
        found += int(mx.argmax(logits[0, -1])) == tokenizer.encode(f" {value}").ids[0]
    assert found == 6
