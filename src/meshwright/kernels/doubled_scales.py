"""Double quantization (Dettmers et al. 2023, arXiv:2305.14314, section 3): scales that are codes of 8 bits themselves.

    S = outer * table[code] + offset

The offset is the mean of a matrix's scales; each run of 256 of them, row after row, has its largest magnitude in
`outer`. The table is the signed dynamic one of Dettmers 2016 (arXiv:1511.04561): seven powers of ten, the finer cut the
larger they are.
"""

import torch
from torch import Tensor

from meshwright.kernels.quantization import grouped
from meshwright.spec.code_cuts import ScalePlaces
from meshwright.spec.quantization_schemes import DOUBLED

POWERS = 7


def _dynamic_numbers() -> tuple[float, ...]:
    """Compute the table in fp32, with the roundings of torch on a CPU, which stored files have."""
    numbers = [0.0, 1.0]
    for power in range(POWERS):
        edges = torch.linspace(0.1, 1, 2**power + 1, dtype=torch.float32, device="cpu")
        middles = 10 ** (power - POWERS + 1) * ((edges[:-1] + edges[1:]) / 2.0)
        numbers += [*middles.tolist(), *(-middles).tolist()]
    return tuple(sorted(numbers))


DYNAMIC = _dynamic_numbers()
"""The table: 256 numbers, ascending."""


def dynamic_table(device: torch.device) -> Tensor:
    """Return the table (256,) fp32 on a device."""
    return torch.tensor(DYNAMIC, dtype=torch.float32, device=device)


def doubled(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize scales (..., N, groups) fp32: codes uint8, outer (..., ceil(N groups / 256)), offset (..., 1)."""
    flat = scales.flatten(-2)
    offset = flat.mean(-1, keepdim=True)
    runs = grouped(flat - offset, min(DOUBLED, flat.shape[-1]))
    outer = runs.abs().amax(-1)
    shares = runs / torch.where(outer == 0, torch.ones_like(outer), outer).unsqueeze(-1)
    table = dynamic_table(scales.device)
    codes = torch.bucketize(shares, (table[1:] + table[:-1]) / 2).to(torch.uint8)
    return codes.flatten(-2)[..., : flat.shape[-1]].view(scales.shape).contiguous(), outer, offset


def undoubled(codes: Tensor, outer: Tensor, offset: Tensor, table: Tensor, places: ScalePlaces | None = None) -> Tensor:
    """Return scales (..., N, groups) fp32 from their codes and `dynamic_table`.

    Args:
        places: Position of the codes in a larger matrix, to which outer and offset belong. None = they are all.
    """
    flat = codes.flatten(-2)
    numbers = table.index_select(0, flat.flatten().int()).view(flat.shape)
    if places is None:
        wide = outer.repeat_interleave(DOUBLED, -1)[..., : flat.shape[-1]]
    else:
        wide = outer.index_select(-1, _run_indices(places, codes.shape[-2], codes.shape[-1], codes.device))
    scales: Tensor = numbers.mul_(wide).add_(offset).view(codes.shape)
    return scales


def _run_indices(places: ScalePlaces, rows: int, groups: int, device: torch.device) -> Tensor:
    """Return the run of the whole matrix in which each scale (rows groups,) lies."""
    row = torch.arange(places.row, places.row + rows, dtype=torch.int32, device=device)
    group = torch.arange(places.group, places.group + groups, dtype=torch.int32, device=device)
    return ((row * places.groups).unsqueeze(1) + group).flatten() // DOUBLED
