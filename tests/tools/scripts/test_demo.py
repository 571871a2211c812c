"""The talks of `scripts/demo`: their prompts, and the answers that are expected."""

import pytest

from scripts.tools.demo import main as demo
from scripts.tools.demo.questions import CONVERSATIONS, Conversation, Talk
from scripts.tools.host.lib import Answer, Client
from scripts.tools.real import chat

SYSTEM = f"<|im_start|>system\n{chat.SYSTEM}<|im_end|>\n"


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda conversation: conversation.title)
def test_a_talk_with_the_demo_model_is_the_conversation(conversation: Conversation) -> None:
    talk = Talk.known(conversation)
    for number, turn in enumerate(conversation.turns):
        assert talk.prompt(number) == conversation.prompt(number)
        assert talk.expected(number, "anything") == turn.answer


def test_an_answer_that_was_not_known_is_expected_from_then_on() -> None:
    talk = Talk("numbers", ("One?", "Two?"), chat.render)
    assert talk.prompt(0) == f"{SYSTEM}<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"
    assert [talk.expected(0, answer) for answer in ("1", "2")] == ["1", "1"]
    assert talk.prompt(1).endswith(
        "<|im_start|>assistant\n1<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_system_message_takes_the_place_of_the_models_own() -> None:
    told = chat.render([("system", "Be brief."), ("user", "Hello")])
    assert told.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello")
    assert chat.SYSTEM not in told


async def test_another_answer_than_the_expected_one_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = iter(("1", "2", "1", "3"))

    async def ask(*_: object) -> demo.Measured:
        return demo.Measured(next(given), Answer(done=True, prompt_eval_count=1, eval_count=1), 0.0)

    monkeypatch.setattr(demo, "ask", ask)
    talk, client = Talk("numbers", ("One?", "Two?"), chat.render), Client.__new__(Client)
    assert await demo.hold(client, talk, (0, 1), {})
    assert "WRONG" not in capsys.readouterr().out
    assert not await demo.hold(client, talk, (0, 1), {})
    assert "WRONG, expected: 2" in capsys.readouterr().out
