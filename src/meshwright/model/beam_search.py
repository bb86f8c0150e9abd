"""The likeliest continuation of a prompt, searched for by beams: several beginnings are followed at once.

Letters: B beams, V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshwright.model.generate import Generation
from meshwright.model.prompt_batch import PromptBatch
from meshwright.model.transformer import Transformer
from meshwright.spec.errors import PlanError


@dataclass(frozen=True, slots=True)
class Beam:
    """A beginning, and the log-probabilities of its tokens."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()

    @property
    def total(self) -> float:
        """Nats."""
        return sum(self.logprobs)

    @property
    def mean(self) -> float:
        """Nats per token, by which ended continuations of several lengths compare."""
        return self.total / max(1, len(self.ids))


@torch.no_grad()
def beam_search(
    model: Transformer, prompt: Sequence[int], *, beams: int, max_new_tokens: int, stop_ids: Sequence[int] = ()
) -> Generation:
    """The continuation with the largest mean log-probability of those that `beams` beginnings lead to. It ends when as
    many have ended; the best unended one is taken where none has. One beam is greedy. PlanError."""
    if beams < 1:
        raise PlanError(f"beams={beams} must be at least 1 (greedy)")
    batch = PromptBatch(model, [prompt])
    alive, ended = [Beam()], list[Beam]()
    for _ in range(min(max_new_tokens, model.shape.max_positions - len(prompt) + 1)):
        parents, grown = _grown(alive, batch.logits().log_softmax(-1), 2 * beams)
        ended += [beam for beam in grown[:beams] if beam.ids[-1] in stop_ids]
        goes_on = [place for place, beam in enumerate(grown) if beam.ids[-1] not in stop_ids][:beams]
        alive = [grown[place] for place in goes_on]
        if len(ended) >= beams or not alive:
            break
        device = batch.last.device
        batch.select(torch.tensor([parents[place] for place in goes_on], device=device))
        batch.feed(torch.tensor([[beam.ids[-1]] for beam in alive], device=device))
    best = max(ended or alive, key=lambda beam: beam.mean)
    return Generation(ids=list(best.ids), logprobs=list(best.logprobs))


def _grown(alive: Sequence[Beam], logs: torch.Tensor, most: int) -> tuple[list[int], list[Beam]]:
    """(whose child each is, the likeliest beginnings that are one token longer), of log-probabilities (B, V)."""
    totals = torch.tensor([beam.total for beam in alive], dtype=torch.float64, device=logs.device)
    found = (logs.double() + totals[:, None]).flatten().topk(min(most, logs.numel())).indices.tolist()
    places = [divmod(one, logs.shape[1]) for one in found]
    grown = [
        Beam((*alive[row].ids, token), (*alive[row].logprobs, float(logs[row, token]))) for row, token in places
    ]  # fmt: skip
    return [row for row, _ in places], grown
