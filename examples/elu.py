"""ELU three ways: eager's chain of five kernels, torch.compile, and one kernel by hand in Triton.

    python examples/elu.py                 # a CPU, or the GPU of this machine
    python examples/elu.py --elements 1e8 --json

ELU(x) = x where x >= 0, else alpha (exp(x) - 1) (Clevert et al. 2015, arXiv:1511.07289). On a CPU the Triton kernel
runs in Triton's interpreter on a few elements: right, and far too slow to time.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

try:
    import triton
    import triton.language as tl
except ImportError:  # not on this system: two ways are left
    triton = None

ALPHA = 1.0
BLOCK = 1024
SHOWN = {"H100": 3.35e12, "H200": 4.8e12, "A100": 2.04e12}
"""Bytes per second of the datasheets, for the predicted column."""
INTERPRETED = 4096
"""Elements that the interpreter gets."""


def eager(x: Tensor) -> Tensor:
    """Five kernels: each reads its inputs from memory and writes its result there."""
    negative = x < 0
    grown = torch.exp(x)
    lowered = grown - 1
    scaled = lowered * ALPHA
    return torch.where(negative, scaled, x)


if triton is not None:

    @triton.jit
    def elu_kernel(x, out, number, ALPHA: tl.constexpr, BLOCK: tl.constexpr):
        """One read and one write for each element; all between stays in registers."""
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < number)
        activated = tl.where(value < 0, ALPHA * (tl.exp(value) - 1), value)
        tl.store(out + at, activated, mask=at < number)


def by_hand(x: Tensor) -> Tensor:
    """One kernel, a program for each 1,024 elements."""
    out = torch.empty_like(x)
    elu_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), ALPHA=ALPHA, BLOCK=BLOCK)
    return out


class Counter(TorchDispatchMode):
    """Operations of the eager form, and the bytes of tensors that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.moved = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        tensors = [x for x in (*args, output) if isinstance(x, Tensor)]
        self.names.append(function.overloadpacket.__name__)
        self.moved += sum(x.numel() * x.element_size() for x in tensors)
        return output


def seconds(function: Callable[[Tensor], Tensor], x: Tensor, rounds: int = 20) -> float:
    """The median of some calls, after two that are not counted."""
    taken = []
    for _ in range(rounds + 2):
        if ON_GPU:
            torch.cuda.synchronize()
        began = time.perf_counter()
        function(x)
        if ON_GPU:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[2:])


def compare(elements: int, *, compiled: bool = True) -> list[dict[str, Any]]:
    """A row for each way: kernels, bytes for each element, seconds (None = not timed), largest difference."""
    x = torch.randn(elements, device="cuda" if ON_GPU else "cpu")
    right = torch.nn.functional.elu(x, ALPHA)
    with Counter() as counted:
        eager(x)
    each = x.element_size()
    rows = [{"way": "eager", "kernels": len(counted.names), "bytes": counted.moved / elements, "given": (eager, x)}]
    if compiled:
        rows.append({"way": "torch.compile", "kernels": 1, "bytes": 2.0 * each, "given": (torch.compile(eager), x)})
    if triton is not None:
        part = x if ON_GPU else x[:INTERPRETED]
        rows.append({"way": "Triton", "kernels": 1, "bytes": 2.0 * each, "given": (by_hand, part)})
    for row in rows:
        function, inputs = row.pop("given")
        row["difference"] = (function(inputs) - right[: len(inputs)]).abs().max().item()
        row["seconds"] = None if len(inputs) < elements else seconds(function, inputs)
        row["predicted"] = {name: row["bytes"] * elements / rate for name, rate in SHOWN.items()}
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=float, default=1 << 26 if ON_GPU else 1 << 22)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out, which wants a C++ compiler")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = compare(int(options.elements), compiled=not options.no_compile)
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{int(options.elements):,} fp32 elements on {torch.cuda.get_device_name() if ON_GPU else 'a CPU'}")
    print(f"{'way':15}{'kernels':>8}{'bytes/element':>15}{'measured':>14}{'H100, predicted':>17}{'difference':>12}")
    for row in rows:
        measured = f"{row['seconds'] * 1e3:.3f} ms" if row["seconds"] else "interpreted"
        predicted = f"{row['predicted']['H100'] * 1e6:.1f} us"
        print(
            f"{row['way']:15}{row['kernels']:8}{row['bytes']:15.0f}{measured:>14}{predicted:>17}{row['difference']:12.1e}"
        )


if __name__ == "__main__":
    main()
