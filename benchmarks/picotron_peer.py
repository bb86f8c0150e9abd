"""picotron (github.com/huggingface/picotron) with its own Llama of the same shape, from a checkout beside this one.

    git clone https://github.com/huggingface/picotron; export PICOTRON=$PWD/picotron

Its code is not changed, but it does not run on a CPU as it is: `picotron/model.py` imports flash_attn at its top, and
its pipeline and ring call torch.cuda.synchronize() after every message. Both names are filled here with something that
is never used or does nothing. Its training step (train.py) wraps data-parallel ranks only, so that context-parallel
ranks alone would never sum their gradients; here they are wrapped too. It has no clipping: torch's is added.
"""

import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.parallel_work import CLIP, RATE, Work

UNUSED = {
    "flash_attn": (),
    "flash_attn.flash_attn_interface": ("flash_attn_func",),
    "flash_attn.layers": (),
    "flash_attn.layers.rotary": ("apply_rotary_emb",),
    "flash_attn.ops": (),
    "flash_attn.ops.triton": (),
    "flash_attn.ops.triton.layer_norm": ("layer_norm_fn",),
}
"""Modules that picotron imports and, with FLASH_ATTEN=0, never calls."""


def checkout() -> Path | None:
    """Where picotron lies, if anywhere."""
    folder = Path(os.environ.get("PICOTRON", "picotron"))
    return folder if (folder / "picotron" / "model.py").is_file() else None


class _Batches:
    """What picotron's pipeline reads: an iterator of micro-batches that knows how many make a step."""

    def __init__(self, tokens: Tensor, targets: Tensor, micro_batches: int) -> None:
        self.grad_acc_steps = micro_batches
        self.left = list(zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True))

    def __next__(self) -> dict[str, Tensor]:
        tokens, targets = self.left.pop(0)
        return {"input_ids": tokens, "target_ids": targets, "position_ids": torch.arange(tokens.shape[1])[None]}


class Picotron:
    """`axis` is dp, tp, cp or pp over all ranks; `schedule` afab or 1f1b. One axis a process: its groups are global."""

    def __init__(self, work: Work, axis: str, schedule: str = "") -> None:
        folder = checkout()
        assert folder is not None
        sys.path.insert(0, str(folder))
        _pretend(axis)
        import picotron.process_group_manager as groups
        from picotron.context_parallel.context_parallel import apply_context_parallel
        from picotron.data_parallel.data_parallel import DataParallelBucket
        from picotron.model import Llama
        from picotron.pipeline_parallel import pipeline_parallel
        from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel

        sizes = {f"{name}_size": dist.get_world_size() if name == axis else 1 for name in ("tp", "cp", "pp", "dp")}
        if not hasattr(groups, "process_group_manager"):
            groups.setup_process_group_manager(**sizes)
        torch.manual_seed(0)
        config = _config(work)
        model: Any = Llama(config=config)
        if axis == "tp":
            model = apply_tensor_parallel(model)
        if axis == "pp":
            model = pipeline_parallel.PipelineParallel(model, config)
        if axis == "cp":
            model = apply_context_parallel(model)
        if axis in ("dp", "cp"):
            model = DataParallelBucket(model)
        self.model, self.work, self.axis = model, work, axis
        self.run = getattr(pipeline_parallel, f"train_step_pipeline_{schedule}", None)
        self.parameters: list[nn.Parameter] = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """As its train.py: gradients dropped, forward and backward, update, buckets emptied."""
        self.optimizer.zero_grad()
        rank, world = dist.get_rank(), dist.get_world_size()
        if self.axis in ("dp", "cp"):
            dim = 0 if self.axis == "dp" else 1
            tokens, targets = tokens.chunk(world, dim)[rank], targets.chunk(world, dim)[rank]
        if self.run is not None:
            size = (self.work.micro_rows, self.work.sequence, self.work.shape.hidden)
            batches = _Batches(tokens, targets, self.work.micro_batches)
            loss = torch.tensor(float(self.run(self.model, batches, size, torch.device("cpu"), torch.float32)))
        else:
            out = self.model(input_ids=tokens)
            mean = F.cross_entropy(out.view(targets.numel(), -1), targets.reshape(-1))
            mean.backward()
            loss = mean.detach() / world
        self._clip()
        self.optimizer.step()
        if hasattr(self.model, "reset"):
            self.model.reset()
        return loss

    def _clip(self) -> None:
        if self.axis in ("dp", "cp"):
            nn.utils.clip_grad_norm_(self.parameters, CLIP)
            return
        square = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]) ** 2
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(self.parameters, CLIP, square.sqrt())


def _pretend(axis: str) -> None:
    """What picotron expects of its surroundings, before it is imported."""
    os.environ.update(FLASH_ATTEN="0", DEVICE="cpu", DTYPE="float32", LOCAL_RANK=str(dist.get_rank()))
    os.environ["CONTEXT_PARALLEL"] = "1" if axis == "cp" else "0"
    for name, names in UNUSED.items():
        module = sys.modules.setdefault(name, types.ModuleType(name))
        for attribute in names:
            setattr(module, attribute, None)
    torch.cuda.synchronize = lambda *device: None


def _config(work: Work) -> types.SimpleNamespace:
    shape = work.shape
    return types.SimpleNamespace(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=work.sequence,
        rms_norm_eps=shape.norm_eps,
        rope_theta=shape.rope_theta,
    )
