"""The prompts of a real model: rendered by `scripts/host` and tokenized by the runner as transformers does it."""

from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest

from runner.model import open_model
from runner.tokenizer import Tokenizer, open_tokenizer
from scripts.tools.host.models import Catalog, Model
from scripts.tools.host.template import ChatTemplate, Renderer
from scripts.tools.real import chat
from scripts.tools.real.main import make_model

Chat = list[dict[str, str]]
pytestmark = pytest.mark.real


def conversation(*texts: str, system: str | None = None) -> Chat:
    """Returns messages of user and assistant in turn, behind a system message if there is one."""
    told = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]
    return told if system is None else [{"role": "system", "content": system}, *told]


CHATS = {
    "one question": conversation("What is 7 plus 5?"),
    "a system message": conversation("Hello", system="Be brief. Answer in French."),
    "an empty system message": conversation("Hello", system=""),
    "several turns": conversation("Hello", "Hello! How can I help?", "Count to 12345.", "1, 2, 3 ...", "Go on"),
    "several turns and a system message": conversation("a", "b", "c", "d", "e", system="One letter each."),
    "the answer is the last": conversation("Hello", "Hello!"),
    "white space": conversation("  two  spaces\n\n\ttab\r\n", "\n", " "),
    "other scripts": conversation("naïve façade, 日本語, 🙂👩‍👩‍👧", "Ελλάδα 1234567890"),
    "markup": conversation("{{ messages }} {% raw %} <b>&amp;</b> <|im_start|>user\nme<|im_end|>", "'\"\\"),
    "code": conversation("def f(x):\n    return x**2  # 100%\n"),
}


@pytest.fixture(scope="module")
def directory() -> Path:
    return make_model()


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Callable[[Chat, bool], tuple[str, list[int]]]:
    """Returns the text and the ids of a chat, from transformers."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)

    def render(messages: Chat, opened: bool) -> tuple[str, list[int]]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened)
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=opened, return_dict=True)
        return text, list(encoded["input_ids"])

    return render


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return open_tokenizer(open_model(str(directory), Path("unused")).checkpoint.file, merge_eos=True)


@pytest.fixture
async def renderer() -> AsyncIterator[Renderer]:
    renderer = Renderer()
    yield renderer
    await renderer.close()


def model_of(directory: Path) -> Model:
    model = Catalog(Path("unused"), directory).find(str(directory))
    assert model is not None
    return model


async def rendered(template: ChatTemplate, renderer: Renderer, messages: Chat, opened: bool) -> str:
    """Returns the prompt of a host; not `opened` is what no host asks for, the chat without the answer's opener."""
    if opened:
        return await template.render(messages)
    assert template.source is not None
    values: Mapping[str, object] = {**template.special_tokens, "messages": messages, "add_generation_prompt": False}
    return await renderer.render(template.source, values)


@pytest.mark.parametrize("opened", [True, False], ids=["opened", "closed"])
@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
async def test_a_prompt_is_that_of_transformers(
    messages: Chat,
    opened: bool,
    directory: Path,
    renderer: Renderer,
    tokenizer: Tokenizer,
    oracle: Callable[[Chat, bool], tuple[str, list[int]]],
) -> None:
    text, ids = oracle(messages, opened)
    assert await rendered(ChatTemplate(model_of(directory), renderer), renderer, messages, opened) == text
    assert tokenizer.encode(text) == ids


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
async def test_the_tools_write_the_prompts_of_the_template(messages: Chat, directory: Path, renderer: Renderer) -> None:
    told = chat.render((message["role"], message["content"]) for message in messages)
    assert told == await ChatTemplate(model_of(directory), renderer).render(messages)
