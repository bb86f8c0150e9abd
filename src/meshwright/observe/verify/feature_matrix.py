"""Which features are tried with which: every pair in some legal layout of at most 8 ranks, or refused with a reason."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

import torch

from meshwright.observe.ranks import on_ranks
from meshwright.observe.tiny_models import shrink
from meshwright.observe.verify.feature_names import ALL, FEATURES, LARGEST_WORLD
from meshwright.observe.verify.one_device import Case, RankOutcome, first_difference, outcome
from meshwright.parallel.mesh import Made
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.layout import Layout
from meshwright.spec.legal import layout_violations

BATCH = 8
"""Layouts that one set of processes runs."""
LIMIT_S = 600.0
CASE = Case(shape=replace(shrink("qwen3-30b-a3b"), layers=5))
"""Grouped-query attention with norms of queries and keys, dense and routed parts, an odd number of layers and
tokens."""
DENSE = Case(shape=replace(shrink("llama-3.1-8b"), layers=5))
EVERY_EXPERT = replace(CASE, shape=replace(CASE.shape, moe=CASE.shape.moe and replace(CASE.shape.moe, top_k=8)))
"""In bf16: a token that two experts want almost equally would go to the other, and take a whole gradient with it."""

NARROW: Mapping[str, int] = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 64}
"""Of a shape for products in fp8: multiples of 16 on four tp ranks, and few layers, whose rounding adds up."""
ROUNDED = ("bf16", "fp8", "fp16", "no masters")
"""Features with a wider band."""

COMPILED_ALONE = (
    ("compiled",), ("compiled", "bf16", "packed"), ("compiled", "bf16", "selective"), ("compiled", "bf16", "full"),
    ("compiled", "fp8"),
)  # fmt: skip
"""Compiled cases of one rank: what runs train with."""
PLAIN = Layout(compile="off", kernels="reference")
"""What one rank is compared with: plain code on the same device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One layout that is run beside one device, and the features that it has."""

    layout: Layout
    packed: bool
    precision: str = "fp32"
    products: str = "same"
    optimizer: Literal["adamw", "muon"] = "adamw"
    optimizer_states: Literal["fp32", "bf16", "int8"] = "fp32"
    master_weights: Literal["fp32", "none"] = "fp32"
    features: frozenset[str]

    @property
    def case(self) -> Case:
        """What is trained."""
        routed = self.layout.ep > 1 or (self.layout.pp > 1 and self.precision == "fp32")
        base = DENSE if not routed else CASE if self.precision == "fp32" else EVERY_EXPERT
        shape = base.shape if self.products == "same" else replace(base.shape, **NARROW)  # type: ignore[arg-type]  # all of NARROW are sizes
        return replace(
            base, shape=shape, packed=self.packed, precision=self.precision, products=self.products,
            optimizer=self.optimizer, optimizer_states=self.optimizer_states, master_weights=self.master_weights,
        )  # fmt: skip

    @property
    def title(self) -> str:
        """The features in the order of the table."""
        return ", ".join(name for name in ALL if name in self.features) or "one device"


CASE_KEYS: Mapping[str, Any] = {
    "packed": False, "precision": "fp32", "products": "same", "optimizer": "adamw", "optimizer_states": "fp32",
    "master_weights": "fp32",
}  # fmt: skip
"""Settings of a feature that are the case's and not the layout's, and what they are without it."""


def merged(names: Sequence[str]) -> dict[str, Any] | None:
    """All settings together; None where two features are alternatives."""
    found: dict[str, Any] = {}
    for name in names:
        for key, value in ALL[name].items():
            if found.setdefault(key, value) != value:
                return None
    return found


def trial(names: Sequence[str]) -> Trial | str | None:
    """A layout with all these features, why it is refused, or None where they are alternatives or need more ranks."""
    settings = merged(names)
    if settings is None:
        return None
    case = {key: settings.pop(key, default) for key, default in CASE_KEYS.items()}
    if settings.get("ep", 1) > 1 and not {"dp_shard", "cp", "tp"} & settings.keys():
        settings["dp_shard"] = 2
    if settings.get("dp_shard", 1) * settings.get("cp", 1) == 1:
        settings.setdefault("zero", 0)
    if settings.get("pp", 1) > 1:
        settings.setdefault("micro_batch", 1)
    settings.setdefault("compile", "off")
    layout = Layout(**settings)
    if layout.world > LARGEST_WORLD:
        return None
    has = frozenset(name for name in ALL if _has(layout, case, ALL[name]))
    found = Trial(layout=layout, features=has, **case)
    recipe = replace(found.case.recipe, sequence=found.case.sequence, global_batch=found.case.global_batch)
    refusals = layout_violations(found.case.shape, recipe, layout)
    try:
        layout.micro_batches(found.case.global_batch)
    except IllegalLayout as error:
        refusals.append(str(error))
    return refusals[0] if refusals else found


def _has(layout: Layout, case: Mapping[str, Any], feature: Mapping[str, Any]) -> bool:
    return all((case[key] if key in case else getattr(layout, key)) == value for key, value in feature.items())


def trials(names: Sequence[str] = tuple(FEATURES)) -> tuple[list[Trial], dict[frozenset[str], str]]:
    """Layouts that have every legal pair of the named features (greedily few of them, three features and more at a
    time), and the pairs that are refused with the reason. Those that are ROUNDED come on top."""
    refused: dict[frozenset[str], str] = {}
    exact = [name for name in names if name not in ROUNDED]
    wanted: dict[frozenset[str], Trial] = {}
    for pair in combinations(names, 2):
        found = trial(pair)
        if isinstance(found, str):
            refused[frozenset(pair)] = found
        elif found is not None:
            wanted[frozenset(pair)] = found
    chosen = {found.title: found for found in map(trial, ([name] for name in names)) if isinstance(found, Trial)}
    covered = {pair for found in chosen.values() for pair in _pairs(found)}
    for names_of_pair, found in sorted(wanted.items(), key=lambda item: not item[0].isdisjoint(ROUNDED)):
        if names_of_pair not in covered:
            richer = _enriched(found, covered, exact)
            chosen[richer.title] = richer
            covered |= set(_pairs(richer))
    return list(chosen.values()), refused


def trials_of_one_rank(*, every_compiled: bool = False) -> tuple[list[Trial], dict[frozenset[str], str]]:
    """As `trials`, of all features that take no second rank; compiled ones last. A case takes a GPU about a second, a
    compiled one about fifteen: without `every_compiled` these are COMPILED_ALONE, in place of each pair."""
    names = [name for name in ALL if isinstance(found := trial([name]), Trial) and found.layout.world == 1]
    chosen, refused = trials([name for name in names if every_compiled or name != "compiled"])
    if not every_compiled:
        chosen += [found for found in map(trial, COMPILED_ALONE) if isinstance(found, Trial)]
    return sorted(chosen, key=lambda found: found.layout.compile == "on"), refused


def _enriched(found: Trial, covered: set[frozenset[str]], names: Sequence[str]) -> Trial:
    """More features on top, as long as the layout stays legal and each adds a pair that was not tried yet."""
    for name in names:
        more = trial([*(n for n in ALL if n in found.features and n != "zero 0"), name])
        if (
            isinstance(more, Trial)
            and found.features < more.features
            and set(_pairs(more)) - set(_pairs(found)) - covered
        ):
            found = more
    return found


def _pairs(found: Trial) -> Iterator[frozenset[str]]:
    return (frozenset(pair) for pair in combinations(sorted(found.features), 2))


def run(chosen: Sequence[Trial], device: str = "cpu") -> Iterator[tuple[Trial, str | None]]:
    """Each trial with its first difference from one device (None = equal), by world size.

    `device` cuda = a GPU for each rank, NCCL between them.
    """
    for found, alone, ranks in outcomes(chosen, device):
        yield found, first_difference(alone, ranks, found.case.band)


def outcomes(chosen: Sequence[Trial], device: str = "cpu") -> Iterator[tuple[Trial, RankOutcome, list[RankOutcome]]]:
    """Each trial with what one device found and what its ranks did, by world size; ranks live for one size."""
    expected: dict[tuple[Case, Layout], RankOutcome] = {}
    for world in sorted({found.layout.world for found in chosen}):
        some = [found for found in chosen if found.layout.world == world]
        beside = PLAIN if world == 1 else Layout(compile="off")
        at_once = 1 if world == 1 else BATCH
        for start in range(0, len(some), at_once):
            part = some[start : start + at_once]
            cases = [(found.case, found.layout) for found in part]
            if world == 1:  # no processes: each is reported as it ends
                together = [[received(one)] for one in outcomes_of(cases, device)]
            else:
                together = on_ranks_of(world, cases, device, LIMIT_S)
            for found, ranks in zip(part, together, strict=True):
                key = found.case, beside
                if key not in expected:
                    expected[key] = outcome(*key, device=device)
                yield found, expected[key], ranks


def on_ranks_of(
    world: int, cases: Sequence[tuple[Case, Layout]], device: str, limit_s: float
) -> list[list[RankOutcome]]:
    """For each case what its ranks found, in processes of their own. RankError."""
    ranks = on_ranks(world, outcomes_of, cases, device, limit_s=limit_s, device=device)
    return [[received(rank[place]) for rank in ranks] for place in range(len(cases))]


def outcomes_of(cases: Sequence[tuple[Case, Layout]], device: str) -> list[RankOutcome]:
    """On one rank: all cases of one world size, over the same process groups."""
    made: Made = {}
    found = []
    for case, layout in cases:
        found.append(sent(outcome(case, layout, device=device, made=made)))
        if layout.compile == "on":
            torch.compiler.reset()  # code is kept by what it was made of, and of each function only so much
    return found


def sent(found: RankOutcome) -> RankOutcome:
    """As it goes to another process, with arrays for tensors: a tensor travels as an open file, and thousands are too
    many."""
    return replace(found, tensors={name: (box, tensor.numpy()) for name, (box, tensor) in found.tensors.items()})


def received(found: RankOutcome) -> RankOutcome:
    """As it was before `sent`."""
    return replace(found, tensors={name: (box, torch.from_numpy(a)) for name, (box, a) in found.tensors.items()})
