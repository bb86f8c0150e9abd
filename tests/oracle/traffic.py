"""What the planner says a step sends, beside what the process groups' own operations saw, for random layouts.

    python -m tests.oracle.traffic --number 30 --seed 1

prints each case that differs and, with --json, how many were equal. Neither side reads the other's rule: the planner
needs no torch, and the witness sees calls of torch.distributed's backends and the sizes of their tensors.
"""

import argparse
import json
import random
from collections.abc import Iterator
from typing import Any

from meshwright.observe.oracle.one_device import Case
from meshwright.observe.ranks import on_ranks
from meshwright.planner.time.collectives import traffic
from meshwright.spec import Layout, ModelShape, MoEShape, Plan, Recipe
from meshwright.spec.layout.layout import RECOMPUTE, place_of
from tests.parallel.test_traffic import assert_seen, both

Drawn = tuple[Case, int, dict[str, Any]]
"""A case, processes and the layout's options."""


def drawn(number: int, seed: int) -> Iterator[Drawn]:
    """So many legal ones. Each token visits every expert: routing leaves no choice."""
    pick, actual = random.Random(seed).choice, 0
    while actual < number:
        heads, hidden = pick([4, 8]), pick([24, 32, 40])
        kv_heads = pick([k for k in (1, 2, 4, 8) if heads % k == 0])
        experts = pick([0, 0, 2, 4])
        moe = MoEShape(experts=experts, top_k=experts, ffn=12, shared_experts=pick([0, 1])) if experts else None
        shape = ModelShape(
            vocab=pick([61, 64, 67]), layers=pick([2, 3, 5]), hidden=hidden, heads=heads, head_dim=pick([4, 6]),
            kv_heads=kv_heads, ffn=pick([36, 40]), max_positions=32, qkv_bias=pick([True, False]),
            out_bias=pick([True, False]), qk_norm=pick([True, False]), tied=pick([True, False]), moe=moe,
            family="mixtral" if moe else "llama",
        )  # fmt: skip
        world = pick([2, 4, 4])
        degrees = [pick([1, 2, 4]) for _ in range(5)]
        options: dict[str, Any] = dict(zip(("tp", "cp", "pp", "dp_shard", "dp_replicate"), degrees, strict=True))
        options |= {
            "zero": pick([0, 1, 2, 3]), "sp": pick([True, False]), "micro_batch": pick([1, 2]),
            "recompute": pick(list(RECOMPUTE)), "context": pick(["ring", "all-gather"]),
            "ep": pick([1, 2, 4]) if moe else 1, "schedule": pick(["afab", "1f1b", "zb-h1"]),
        }  # fmt: skip
        case, layout = Case(shape=shape, precision=pick(["fp32", "bf16"])), Layout(**options)
        if layout.world == world and not _plan(case, layout).violations():
            actual += 1
            yield case, world, options


def _plan(case: Case, layout: Layout) -> Plan:
    recipe = Recipe(sequence=case.sequence, global_batch=case.global_batch, precision=case.precision)  # type: ignore[arg-type]
    return Plan(model=case.shape, recipe=recipe, layout=layout)


def _seen(cases: list[Drawn]) -> list[Any]:
    return [both(case, [options])[0] for case, _, options in cases]


def differences(cases: list[Drawn]) -> list[tuple[Drawn, str]]:
    """The cases in which planner and witness differ, and in what. Those of as many processes run in the same ones."""
    wrong = []
    for world in sorted({number for _, number, _ in cases}):
        part = [case for case in cases if case[1] == world]
        ranks = on_ranks(world, _seen, part, limit_s=60.0 * len(part))
        for index, entry in enumerate(part):
            actual = [_difference(entry, rank, answers[index]) for rank, answers in enumerate(ranks)]
            wrong += [(entry, sentence) for sentence in actual if sentence][:1]
    return wrong


def _difference(entry: Drawn, rank: int, answer: Any) -> str:
    """Asked of the first rank of each pipeline place; "" = nothing."""
    (case, _, options), (_, seen, axes) = entry, answer
    lookup = _plan(case, Layout(**options))
    at = place_of(lookup.layout, rank)
    if any(location for axis, location in at.items() if axis != "pp"):
        return ""
    told = {(entry.axis, entry.collective): (entry.calls, entry.sent_bytes) for entry in traffic(lookup, at["pp"])}
    seen = {key: count for key, count in seen.items() if key[1] != "barrier"}  # of a pipeline, once a run
    try:
        assert_seen(told, seen, axes, f"rank {rank}")
    except AssertionError as error:
        return str(error).splitlines()[0]
    return ""


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    wrong = differences(list(drawn(asked.number, asked.seed)))
    for (case, world, options), actual in wrong if not asked.json else []:
        print(f"{case}, {world} ranks, {options}:\n    {actual}")
    equal = asked.number - len(wrong)
    print(json.dumps({"cases": asked.number, "equal": equal}) if asked.json else f"{equal} of {asked.number} equal")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
