"""Sampling over the wire, beyond the conformance cases 53-65."""

from scripts.tools.host.lib import Client, Request


async def drawn(client: Client, prompt: str, **options: object) -> str:
    """Returns the text of one completion, of one token by default."""
    return (await client.complete(Request(prompt, {"num_predict": 1, **options}))).text


async def test_samples_follow_the_temperature(client: Client) -> None:
    """At temperature 0.1 the probabilities 0.5 of P and 0.3 of Q become odds of 165 to 1."""
    cold = [await drawn(client, "<532>", temperature=0.1, seed=seed) for seed in range(40)]
    warm = [await drawn(client, "<532>", temperature=1.0, seed=seed) for seed in range(40)]
    assert cold.count("P") >= 38
    assert set(warm) == set("PQS")


async def test_top_p_keeps_the_token_that_crosses_it(client: Client) -> None:
    texts = {await drawn(client, "<532>", temperature=1.0, top_p=0.6, seed=seed) for seed in range(40)}
    assert texts == {"P", "Q"}


async def test_seeded_samples_do_not_depend_on_the_cache_or_on_other_requests(client: Client) -> None:
    """A request draws the same tokens right after itself (cached) and after another one (not cached)."""
    options = {"temperature": 1.0, "seed": 5, "num_predict": 30}
    first = await drawn(client, "drawing W", **options)
    assert await drawn(client, "drawing W", **options) == first
    await drawn(client, "something else altogether", temperature=1.0, seed=-1)
    assert await drawn(client, "drawing W", **options) == first
