"""Bytes that a training step reads and writes in memory, operator by operator: plain kernels against fused ones.

    python -m benchmarks.bytes_moved [--shape 10m] [--sequence 512] [--rows 1] [--json]

Counted on this machine, on a CPU, by a TorchDispatchMode: each operator reads its tensors once and writes its answers
once. Views move nothing. A C loop of this package is one operator. So is torch's fused attention. Caches are left out:
a tensor that is still in the cache is counted like any other.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.train_shapes import shape_of
from meshwright.kernels.c import sequence_attention, training_rows
from meshwright.parallel import build_engine
from meshwright.spec import Layout, Recipe
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.step.batches import Batch
from meshwright.training.step.step import train_step

LOOPS = {
    training_rows: ("rms_norm", "rms_norm_gradients", "swiglu", "swiglu_gradients", "rotate", "losses", "gathered",
                    "write_gradients"),
    sequence_attention: ("attend", "gradients"),
}  # fmt: skip
"""Functions that call C. A dispatch mode does not see inside."""
PICKS = ("embedding", "index_select", "gather")
"""Operators that read as much as they write, whatever the size of their table."""
ALLOCATES = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view")


def size(tree: Any) -> int:
    """Bytes of all different tensors inside."""
    tensors = {id(leaf): leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def is_view(function: Any) -> bool:
    """Whether an operator's answer is another view of its input."""
    answers = function._schema.returns
    return bool(answers) and all(each.alias_info is not None and not each.alias_info.is_write for each in answers)


class Counting(TorchDispatchMode):
    """Bytes read and written, by operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotations there
        self.calls: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.inside_loop = False

    def note(self, name: str, read: Any, written: Any) -> None:
        """Count one operator."""
        self.calls[name] += 1
        self.moved[name] += size(read) + size(written)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if self.inside_loop or is_view(function) or name in ALLOCATES:
            return answer
        self.note(name, answer if name in PICKS else (args, kwargs), answer)
        return answer

    def wrapped(self, name: str, loop: Callable[..., Any]) -> Callable[..., Any]:
        """A C loop that is counted as one operator."""

        def call(*args: Any, **kwargs: Any) -> Any:
            outer, self.inside_loop = self.inside_loop, True
            try:
                answer = loop(*args, **kwargs)
            finally:
                self.inside_loop = outer
            if not outer:
                self.note(f"c:{name}", (args, kwargs), answer)
            return answer

        return call

    @contextmanager
    def counting(self) -> Iterator["Counting"]:
        """Count everything that this process runs inside."""
        with ExitStack() as stack:
            for module, names in LOOPS.items():
                for name in names:
                    stack.enter_context(patch.object(module, name, self.wrapped(name, getattr(module, name))))
            stack.enter_context(self)
            yield self


def step_bytes(shape_name: str, kernels: Any, rows: int, sequence: int) -> Counting:
    """Count the second step of a model in fp32 under layout.kernels."""
    shape = shape_of(shape_name)
    engine = build_engine(shape, Layout(compile="off", kernels=kernels), dtype=torch.float32)
    engine.train()
    optimizer = Optimizer(engine.parameters.items(), Recipe())
    tokens = torch.randint(0, shape.vocab, (rows, sequence + 1), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous(), valid=rows * sequence)

    def step() -> None:
        train_step(engine, optimizer, [batch], rate=1e-4, clip=1.0, balance_loss=0.0)

    step()  # states are made
    with Counting().counting() as counted:
        step()
    return counted


def main() -> None:
    """Count both and print them."""
    reader = argparse.ArgumentParser(description="Bytes moved by a training step, plain and fused.")
    reader.add_argument("--shape", default="10m", help="10m, 100m or 300m (10m)")
    reader.add_argument("--rows", type=int, default=1, help="sequences (1)")
    reader.add_argument("--sequence", type=int, default=1024, help="positions (1024)")
    reader.add_argument("--json", action="store_true", help="print one JSON document")
    options = reader.parse_args()
    counts = {word: step_bytes(options.shape, word, options.rows, options.sequence) for word in ("reference", "auto")}
    if options.json:
        print(json.dumps({
            word: {"bytes": count.moved.total(), "calls": count.calls.total(), "by_operator": dict(count.moved)}
            for word, count in counts.items()
        }))  # fmt: skip
        return
    print(f"one step of llama-{options.shape}, {options.rows} x {options.sequence:,} tokens, fp32, on a CPU")
    for word, count in counts.items():
        print(f"\nlayout.kernels={word}: {count.moved.total() / 1e9:.2f} GB in {count.calls.total():,} operators")
        for name, moved in count.moved.most_common(8):
            print(f"  {name:<46}{count.calls[name]:>7,} {moved / 1e9:>9.3f} GB")
    plain, fused = (count.moved.total() for count in counts.values())
    print(f"\nthe fused kernels move {fused / plain:.0%} of the bytes")


if __name__ == "__main__":
    main()
