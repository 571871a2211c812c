"""Decides from numbers alone how many tokens of a draft are worth their rows; knows no model and no clock."""

from collections.abc import Sequence

from runner.drafts.acceptance import BLOCK_PAUSE, MODEL_PAUSE, Acceptance, match_class
from runner.drafts.cost import DraftCost, RoundCosts, cpu_costs, gpu_costs
from runner.drafts.draft import MODEL_MATCH, SOURCES, Draft

CPU_TOKENS, GPU_TOKENS, MOST_TOKENS = 7, 15, 63
"""The most drafted tokens a round: by default, where the kernel for few rows of a CPU's BLAS ends at 8, and ever."""
_WORTH = 1.01  # times the tokens a second of a shorter draft: less would be noise


class DraftPolicy:
    """Chooses the length that promises the most tokens a second, 0 included, and learns from what comes of it.

    One for all requests of the process. Owner: the engine thread.
    """

    def __init__(self, most: int, first_costs: Sequence[float]) -> None:
        """`most` is the most drafted tokens a round; `first_costs` has the relative costs of rounds of 1 to `most` + 1
        rows, as long as nothing is known."""
        assert len(first_costs) == most + 1
        self.most = most
        self.at_once = False
        """True if the model that drafts takes as long for many tokens as for one."""
        self._costs = RoundCosts(first_costs)
        self._draft_cost = DraftCost(most)
        self._acceptances = {(source, size): Acceptance(size, most) for source in SOURCES for size in range(5)}

    @classmethod
    def for_cpu(cls, most: int = CPU_TOKENS) -> "DraftPolicy":
        """Returns a policy that begins with the costs of CPUs."""
        return cls(most, cpu_costs(most + 1))

    @classmethod
    def for_gpu(cls, most: int = GPU_TOKENS) -> "DraftPolicy":
        """Returns a policy that begins with the costs of GPUs."""
        return cls(most, gpu_costs(most + 1))

    def know_model(self, *, at_once: bool) -> None:
        """Learns of the model that drafts whether it takes as long for many tokens as for one."""
        self.at_once = at_once
        for (source, _), acceptance in self._acceptances.items():
            if source == "model":
                acceptance.most_pause = BLOCK_PAUSE if at_once else MODEL_PAUSE

    def length(self, draft: Draft, context_tokens: int) -> int:
        """Returns how many of the draft's tokens to take, behind so many tokens. Ask once for each draft: now and then
        the answer is a probe.

        At first no more are taken than matched.
        """
        return self._length(draft, len(draft.tokens), self._costs.curve(context_tokens))

    def model_length(self, most: int, context_tokens: int) -> int:
        """Returns how many tokens a model should draft, behind so many tokens: as `length`, but for what drafting
        itself takes."""
        draft = Draft([], "model", MODEL_MATCH)
        if self._acceptance(draft).rests():
            return 0
        rounds = self._costs.curve(context_tokens)
        drafts = (self._draft_cost if self._costs.known else DraftCost(self.most)).curve(rounds[0])
        costs = [seconds + drafts[self._units(length)] for length, seconds in enumerate(rounds)]
        return self._length(draft, most, costs)

    def _length(self, draft: Draft, most: int, costs: Sequence[float]) -> int:
        """Returns how many of at most `most` tokens to take; `costs` are those of none, one, and so on."""
        acceptance = self._acceptance(draft)
        most = min(most, self.most if acceptance.trusted else min(draft.match, self.most))
        best, best_rate = 0, _WORTH / costs[0]
        tokens = all_right = best_tokens = best_right = 1.0
        for length, right in zip(range(1, most + 1), acceptance.rates(), strict=False):
            all_right *= right
            tokens += all_right
            rate = tokens / costs[length]
            if rate > best_rate:
                best, best_rate, best_tokens, best_right = length, rate, tokens, all_right
        if best == most:
            return best
        # Known text costs nothing to look up, and a round may become cheaper; a model is asked in vain.
        hopeful = draft.source != "model" or (best_tokens + best_right) / costs[best + 1] > best_rate
        return best + acceptance.probes(best, hopeful=hopeful)

    def learned(self, draft: Draft, taken: int, accepted: int) -> None:
        """Learns that the first `taken` tokens of a draft made a round, and the first `accepted` of them were right."""
        if taken:
            self._acceptance(draft).learned(taken, accepted)

    def took(self, rows: int, seconds: float, context_tokens: int) -> None:
        """Learns how long a round took; of one row if it was a plain step. Others than drafts may lengthen it further:
        nothing is learned from that."""
        if rows <= self.most + 1:
            self._costs.took(rows, seconds, context_tokens)

    def drafted(self, tokens: int, seconds: float) -> None:
        """Learns how long a model took to draft so many tokens, at least one."""
        self._draft_cost.took(self._units(tokens), seconds)

    def _units(self, tokens: int) -> int:
        """Returns in how many equal times a model drafts so many tokens."""
        return min(tokens, 1) if self.at_once else tokens

    def _acceptance(self, draft: Draft) -> Acceptance:
        return self._acceptances[draft.source, match_class(draft.match)]
