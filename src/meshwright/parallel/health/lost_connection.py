"""How it is known that another rank is gone."""

import torch.distributed as dist


def is_lost_connection(error: BaseException) -> bool:
    """What a collective raises where another rank is gone; Gloo's errors have no class of their own."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in str(error).lower() or "NCCL" in str(error))
    )
