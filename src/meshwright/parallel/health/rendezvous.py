"""Rendezvous: how processes that a launcher has started find each other, and nothing that an earlier attempt left.

torchrun keeps one store for all attempts of a run (2.11 to 2.13). After a restart, a process group that is made in it
reads the addresses of dead processes. The attempt's number does not tell attempts apart (nodes count for themselves),
and the launcher says nothing else. So ranks meet: each writes a new random word, and rank 0 answers each word with the
name of the attempt. All that follows is stored under that name.
"""

import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from meshwright.spec.errors import RunError

PAUSE_S = 0.02
SHOWN = 5
"""Ranks that a sentence names one by one."""


def meet(store: dist.Store, rank: int, world: int, limit_s: float) -> str:
    """Return the name of this attempt, the same on all ranks that are here now.

    Costs rank 0 two small requests for each other rank and look, the others two in all. Raises RunError when some ranks
    do not come in time.
    """
    return _welcome(store, world, limit_s) if rank == 0 else _arrive(store, rank, limit_s)


def _arrive(store: dist.Store, rank: int, limit_s: float) -> str:
    word = secrets.token_hex(8)
    store.set(f"hello/{rank}", word)
    try:
        store.wait([f"welcome/{word}"], timedelta(seconds=limit_s))
    except RuntimeError:
        raise RunError(
            f"rank {rank} waited {limit_s:.0f} s for rank 0: start every rank, with the same address"
        ) from None
    attempt = store.get(f"welcome/{word}").decode()
    store.set(f"here/{attempt}/{rank}", "")
    return attempt


def _welcome(store: dist.Store, world: int, limit_s: float) -> str:
    attempt = secrets.token_hex(8)
    missing, greeted = set(range(1, world)), set()
    end = time.monotonic() + limit_s
    while missing:
        for rank in sorted(missing):
            # A greeting may be left over from an earlier attempt, so only the answer under the new name counts.
            if store.check([f"here/{attempt}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"hello/{rank}"]):
                word = store.get(f"hello/{rank}").decode()  # perhaps that of an attempt which has ended
                # Old words are answered too: nobody tells them apart, and nobody waits for those.
                if word not in greeted:
                    store.set(f"welcome/{word}", attempt)
                    greeted.add(word)
        if missing and time.monotonic() > end:
            raise RunError(
                f"{name_ranks(missing)} of {world} did not come within {limit_s:.0f} s: is every node started?"
            )
        time.sleep(PAUSE_S)
    return attempt


def name_ranks(ranks: set[int]) -> str:
    """Return `rank 3`, `ranks 3 and 4`, or `ranks 3, 4, 5, 6, 7 and 9 more`."""
    shown = [str(rank) for rank in sorted(ranks)[:SHOWN]]
    if len(ranks) > SHOWN:
        shown.append(f"{len(ranks) - SHOWN} more")
    if len(shown) == 1:
        return f"rank {shown[0]}"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
