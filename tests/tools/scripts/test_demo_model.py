"""The committed demo model: what its files hold, and that it answers from its prompt.

Its weights are loaded here as mlx-lm's own class loads them, and run in float32 by a plain loop over mlx-lm's cache: no
code of the runner takes part, so a wrong answer of the runner is the runner's.
"""

import json

import jinja2
import pytest
from tokenizers import Tokenizer

from scripts.tools.demo.plain import answer, load_text, weights_path
from scripts.tools.demo.questions import CONVERSATIONS, END, SMALL_TALK, Conversation, Message, render
from tests import ROOT

# isort: split
from mlx_lm.models import llama

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


def test_the_small_model_has_the_same_tokens_and_a_fifth_of_the_weights() -> None:
    files = {path.name: path.read_bytes() for path in SMALL_MODEL.iterdir()}
    differing = {name for name in files if files[name] != (MODEL / name).read_bytes()}
    assert differing == {"config.json", "model.safetensors"}
    sizes = [weights_path(model).stat().st_size for model in (SMALL_MODEL, MODEL)]
    assert sizes[0] * 4 < sizes[1]
    assert sum(map(len, files.values())) <= 800_000


def test_the_small_model_answers_small_talk_as_the_larger_one() -> None:
    small = load_text(SMALL_MODEL)
    assert {said: answer(*small, render([Message("user", said)])) for said in SMALL_TALK} == SMALL_TALK


def test_the_end_marker_is_the_eos_token_everywhere(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id(END)
    assert end  # mlx-lm takes a 0 in generation_config.json for no EOS at all
    assert read_json("config.json")["eos_token_id"] == end
    assert read_json("generation_config.json")["eos_token_id"] == end
    assert read_json("tokenizer_config.json")["eos_token"] == END


def test_the_chat_template_renders_what_the_demo_host_sends() -> None:
    source = str(read_json("tokenizer_config.json")["chat_template"])
    template = jinja2.Environment(autoescape=False).from_string(source)
    chat = [Message("system", "Nora lives in Oslo."), Message("user", "Hello"), Message("assistant", "<Hi> & {{x}}")]
    written = template.render(messages=[message._asdict() for message in chat], add_generation_prompt=True)
    assert written == render(chat)


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda conversation: conversation.title)
def test_demo_conversations_are_answered_as_the_demo_expects(
    demo: tuple[llama.Model, Tokenizer], conversation: Conversation
) -> None:
    answers = [answer(*demo, conversation.prompt(index)) for index in range(len(conversation.turns))]
    assert answers == [turn.answer for turn in conversation.turns]
