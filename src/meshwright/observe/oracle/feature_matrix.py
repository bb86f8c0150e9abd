"""The matrix of features: every pair in some legal layout of at most 8 ranks, or refused with a reason."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

import torch

from meshwright.observe.oracle.features import ALL, FEATURES, LARGEST_WORLD, shrink
from meshwright.observe.oracle.one_device import Case, RankOutcome, first_difference, outcome
from meshwright.observe.ranks import on_ranks
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.layout.layout import Layout
from meshwright.spec.rules.legal import layout_violations

BATCH = 8
"""Layouts that one set of processes runs."""
LIMIT_S = 600.0
CASE = Case(shape=replace(shrink("qwen3-30b-a3b"), layers=5))
"""Grouped-query attention with norms of queries and keys, dense and routed layers, an odd number of layers."""
DENSE = Case(shape=replace(shrink("llama-3.1-8b"), layers=5))
EVERY_EXPERT = replace(CASE, shape=replace(CASE.shape, moe=CASE.shape.moe and replace(CASE.shape.moe, top_k=8)))
"""Case in bf16, where a near tie between two experts would send a token, and its whole gradient, to the other."""

NARROW: Mapping[str, int] = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 64}
"""Sizes for products in fp8: multiples of 16 on four tp ranks, and few layers, whose rounding accumulates."""
ROUNDED = ("bf16", "fp8", "fp16", "no masters")

COMPILED_ALONE = (
    ("compiled",), ("compiled", "bf16", "packed"), ("compiled", "bf16", "selective"), ("compiled", "bf16", "full"),
    ("compiled", "fp8"),
)  # fmt: skip
"""Compiled cases of one rank, as real runs train."""
PLAIN = Layout(compile="off", kernels="reference")
"""Layout with which one rank is compared: plain code on the same device."""
CASE_KEYS: Mapping[str, Any] = {
    "packed": False, "precision": "fp32", "products": "same", "optimizer": "adamw", "optimizer_states": "fp32",
    "master_weights": "fp32",
}  # fmt: skip
"""Settings of a feature that belong to the case, not to the layout, with their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A layout that is compared with one device, and its features."""

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
        """The training case."""
        routed = self.layout.ep > 1 or (self.layout.pp > 1 and self.precision == "fp32")
        # In 16 bits a near tie between experts would send a token elsewhere, which is no error.
        base = DENSE if not routed else CASE if self.precision == "fp32" else EVERY_EXPERT
        shape = base.shape if self.products == "same" else replace(base.shape, **NARROW)  # type: ignore[arg-type]  # all of NARROW are sizes
        return replace(
            base, shape=shape, packed=self.packed, precision=self.precision, products=self.products,
            optimizer=self.optimizer, optimizer_states=self.optimizer_states, master_weights=self.master_weights,
        )  # fmt: skip

    @property
    def title(self) -> str:
        """Its features in the order of the table."""
        return ", ".join(name for name in ALL if name in self.features) or "one device"


def merge_settings(names: Sequence[str]) -> dict[str, Any] | None:
    """Merge the settings of features. None = two features are alternatives."""
    settings: dict[str, Any] = {}
    for name in names:
        for key, setting in ALL[name].items():
            if settings.setdefault(key, setting) != setting:
                return None
    return settings


def trial(names: Sequence[str]) -> Trial | str | None:
    """Return a layout with all these features, or why it is refused. None = alternatives, or too many ranks."""
    settings = merge_settings(names)
    if settings is None:
        return None
    case = {key: settings.pop(key, default) for key, default in CASE_KEYS.items()}
    # Experts are spread over ranks that an axis of the layout has already.
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
    present = frozenset(name for name in ALL if _has(layout, case, ALL[name]))
    candidate = Trial(layout=layout, features=present, **case)
    recipe = replace(candidate.case.recipe, sequence=candidate.case.sequence, global_batch=candidate.case.global_batch)
    refusals = layout_violations(candidate.case.shape, recipe, layout)
    try:
        layout.micro_batches(candidate.case.global_batch)
    except IllegalLayout as error:
        refusals.append(str(error))
    return refusals[0] if refusals else candidate


def _has(layout: Layout, case: Mapping[str, Any], feature: Mapping[str, Any]) -> bool:
    return all((case[key] if key in case else getattr(layout, key)) == value for key, value in feature.items())


def trials(names: Sequence[str] = tuple(FEATURES)) -> tuple[list[Trial], dict[frozenset[str], str]]:
    """Return layouts that contain every legal pair of features, and refused pairs with the reason.

    Layouts are chosen greedily, with three features or more at a time. Those that are ROUNDED are added last.
    """
    refused: dict[frozenset[str], str] = {}
    exact = [name for name in names if name not in ROUNDED]
    wanted: dict[frozenset[str], Trial] = {}
    for pair in combinations(names, 2):
        answer = trial(pair)
        if isinstance(answer, str):
            refused[frozenset(pair)] = answer
        elif answer is not None:
            wanted[frozenset(pair)] = answer
    trials_by_title = {
        tried.title: tried for tried in map(trial, ([name] for name in names)) if isinstance(tried, Trial)
    }
    covered = {pair for tried in trials_by_title.values() for pair in _pairs(tried)}
    # Rounded pairs come last: their bands are wide, so exact layouts should cover the other pairs first.
    for names_of_pair, tried in sorted(wanted.items(), key=lambda item: not item[0].isdisjoint(ROUNDED)):
        if names_of_pair not in covered:
            richer = _add_features(tried, covered, exact)
            trials_by_title[richer.title] = richer
            covered |= set(_pairs(richer))
    return list(trials_by_title.values()), refused


def trials_of_one_rank(*, every_compiled: bool = False) -> tuple[list[Trial], dict[frozenset[str], str]]:
    """Return trials of all features that need no second rank, compiled ones last.

    A case takes a GPU about a second, a compiled one about fifteen. Without `every_compiled` COMPILED_ALONE replaces
    every compiled pair.
    """
    names = [name for name in ALL if isinstance(tried := trial([name]), Trial) and tried.layout.world == 1]
    selected, refused = trials([name for name in names if every_compiled or name != "compiled"])
    if not every_compiled:
        selected += [tried for tried in map(trial, COMPILED_ALONE) if isinstance(tried, Trial)]
    return sorted(selected, key=lambda tried: tried.layout.compile == "on"), refused


def _add_features(tried: Trial, covered: set[frozenset[str]], names: Sequence[str]) -> Trial:
    """Add features while the layout stays legal and each adds an untried pair."""
    for name in names:
        richer = trial([*(n for n in ALL if n in tried.features and n != "zero 0"), name])
        if (
            isinstance(richer, Trial)
            and tried.features < richer.features
            and set(_pairs(richer)) - set(_pairs(tried)) - covered
        ):
            tried = richer
    return tried


def _pairs(tried: Trial) -> Iterator[frozenset[str]]:
    return (frozenset(pair) for pair in combinations(sorted(tried.features), 2))


def run(chosen: Sequence[Trial], device: str = "cpu") -> Iterator[tuple[Trial, str | None]]:
    """Yield each trial with its first difference from one device (None = equal), by world size."""
    for tried, alone, ranks in outcomes(chosen, device):
        yield tried, first_difference(alone, ranks, tried.case.band)


def outcomes(chosen: Sequence[Trial], device: str = "cpu") -> Iterator[tuple[Trial, RankOutcome, list[RankOutcome]]]:
    """Yield each trial with the outcomes of one device and of its ranks, by world size. Ranks live for one size."""
    expected: dict[tuple[Case, Layout], RankOutcome] = {}
    for world in sorted({tried.layout.world for tried in chosen}):
        same_world = [tried for tried in chosen if tried.layout.world == world]
        beside = PLAIN if world == 1 else Layout(compile="off")
        at_once = 1 if world == 1 else BATCH
        for start in range(0, len(same_world), at_once):
            part = same_world[start : start + at_once]
            cases = [(tried.case, tried.layout) for tried in part]
            # One rank needs no processes, and each trial is then reported as it ends.
            if world == 1:
                together = [[from_arrays(rank_outcome)] for rank_outcome in outcomes_of(cases, device)]
            else:
                together = run_on_ranks(world, cases, device, LIMIT_S)
            for tried, ranks in zip(part, together, strict=True):
                # Many layouts train the same case, whose outcome on one device is computed once.
                key = tried.case, beside
                if key not in expected:
                    expected[key] = outcome(*key, device=device)
                yield tried, expected[key], ranks


def run_on_ranks(
    world: int, cases: Sequence[tuple[Case, Layout]], device: str, limit_s: float
) -> list[list[RankOutcome]]:
    """Run cases in new processes. Returns the outcomes of each case's ranks. Raises RankError."""
    ranks = on_ranks(world, outcomes_of, cases, device, limit_s=limit_s, device=device)
    return [[from_arrays(rank[index]) for rank in ranks] for index in range(len(cases))]


def outcomes_of(cases: Sequence[tuple[Case, Layout]], device: str) -> list[RankOutcome]:
    """Run all cases of one world size on one rank, over the same process groups."""
    process_groups: ProcessGroups = {}
    collected = []
    for case, layout in cases:
        collected.append(to_arrays(outcome(case, layout, device=device, process_groups=process_groups)))
        # torch keeps few compiled versions of a function, and falls back to plain code beyond them.
        if layout.compile == "on":
            torch.compiler.reset()
    return collected


def to_arrays(rank_outcome: RankOutcome) -> RankOutcome:
    """Convert tensors to arrays for another process.

    Each tensor would be sent as an open file, and thousands exceed the limit.
    """
    return replace(
        rank_outcome, tensors={name: (box, tensor.numpy()) for name, (box, tensor) in rank_outcome.tensors.items()}
    )


def from_arrays(rank_outcome: RankOutcome) -> RankOutcome:
    """Undo `to_arrays`."""
    return replace(
        rank_outcome, tensors={name: (box, torch.from_numpy(a)) for name, (box, a) in rank_outcome.tensors.items()}
    )
