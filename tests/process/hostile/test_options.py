"""Options that no user means, through real generations: every line stays one that a host can read."""

import asyncio
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts.tools.host.lib import Client, G
from tests.process.hostile.victim import Victim

INTEGERS = st.sampled_from([0, 1, -1, 2**31, 2**63 - 1, -(2**63)]) | st.integers(-(2**63), 2**63 - 1)
FLOATS = st.sampled_from([0.0, -0.0, 1.0, 1e-30, 1e30, 1e-38, 1e-45, 3.4e38, -3.4e38, -1.0, 1.0000001]) | st.floats(
    width=32, allow_nan=False, allow_infinity=False
)
OPTIONS = st.fixed_dictionaries(
    {"num_predict": st.integers(1, 12)},
    optional={
        **dict.fromkeys(("seed", "top_k", "repeat_last_n"), INTEGERS),
        **dict.fromkeys(
            ("temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"), FLOATS
        ),
        "stop": st.lists(st.text(max_size=3), max_size=4),
    },
)


async def read_whole(victim: Victim, body: dict[str, object]) -> list[dict[str, object]]:
    """Returns the lines of one completion. Fails for a number that is not JSON or a line that a host would drop."""
    async with Client(victim.process.port, G) as client:
        reply = await asyncio.wait_for(client.send("POST", "/completion", json.dumps(body).encode()), 60)
    assert reply.status == 200, reply.text
    lines = reply.body.splitlines(keepends=True)
    assert all(line.endswith(b"\n") and len(line) < 65536 for line in lines)
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


@settings(max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    options=OPTIONS,
    top=st.sampled_from([0, 1, 20, 2**63 - 1, -(2**63)]),
    prompt=st.sampled_from(["W", "0", "a", "\ud800", "\x00", "é😀W"]),
)
def test_any_options_give_an_answer_of_finite_numbers(
    options: dict[str, object], top: int, prompt: str, victim: Victim
) -> None:
    body = {"Prompt": prompt, "Options": options, "Logprobs": True, "TopLogprobs": top}
    *rest, final = asyncio.run(read_whole(victim, body))
    assert final["Done"] is True
    assert final.get("Error") is None
    for entry in (entry for line in rest for entry in line.get("Logprobs") or ()):  # type: ignore[attr-defined]  # JSON
        assert all(math.isfinite(one["logprob"]) for one in (entry, *entry.get("top_logprobs", ())))
        assert len(entry.get("top_logprobs", ())) == min(max(top, 0), 20)
