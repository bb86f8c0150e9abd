"""`meshwright verify --random` and `--case`: random cases beside one device, and one case again."""

from collections.abc import Sequence
from typing import Any

from meshwright.cli.terminal.output import print_json
from meshwright.observe.verify import random_run
from meshwright.observe.verify.case_text import drawn_of, text_of
from meshwright.observe.verify.random_case import random_case
from meshwright.observe.verify.random_run import CaseVerdict
from meshwright.spec.errors import OutsideTolerance, PlanError
from meshwright.spec.units import many


def verify_random(number: int, seed: int, *, processes: int, device: str, json: bool, compiled: bool) -> None:
    """Cases 0 .. number - 1 of a seed, a line each; those that differ once more, as small as they could be made."""
    cases = [random_case(seed, index, processes, compiled=compiled) for index in range(number)]
    found = []
    for verdict in random_run.verdicts(cases, device):
        found.append(verdict)
        if not json:
            print(_line(verdict), flush=True)
    _end(found, device=device, json=json, seed=seed)


def verify_case(text: str, *, device: str, json: bool, processes: int) -> None:
    """One case, with exactly the tokens that it names."""
    drawn = drawn_of(text)
    if drawn.layout.world > processes:
        raise PlanError(f"--case: the layout has {drawn.layout.world} processes, and at most {processes} are allowed")
    one = random_run.verdict(drawn, device)
    if not json:
        print(_line(one), flush=True)
    _end([one], device=device, json=json, seed=None)


def _line(verdict: CaseVerdict) -> str:
    ranks = many(verdict.drawn.layout.world, "rank")
    return f"{verdict.index}  {ranks}  {text_of(verdict.drawn)}: {verdict.difference or 'equal'}"


def _end(found: Sequence[CaseVerdict], *, device: str, json: bool, seed: int | None) -> None:
    """Shrink what differs, print the document or the commands; OutsideTolerance where anything differs."""
    failed = [one for one in found if one.difference]
    commands: dict[int, str] = {}
    for one in failed:
        small = random_run.smallest(one, device) if seed is not None else one
        commands[one.index] = f"meshwright verify --case '{text_of(small.drawn)}'"
        if not json and seed is not None:
            print(f"case {one.index}, made small: {small.difference}\n    {commands[one.index]}", flush=True)
    redrawn = sum(one.redrawn for one in found)
    if json:
        print_json(
            {
                "layouts": len(found),
                "different": len(failed),
                "seed": seed,
                "redrawn": redrawn,
                "results": [_as_json(one, commands) for one in sorted(found, key=lambda one: one.index)],
            }
        )
    if failed:
        raise OutsideTolerance(
            f"{len(failed)} of {many(len(found), 'case')} differ from one device; {failed[0].difference}"
        )
    if not json:
        again = (
            f"; drawn again {many(redrawn, 'time')}, since rounding decided too much on one device" if redrawn else ""
        )
        print(f"{many(len(found), 'case')} equal one device{again}")


def _as_json(one: CaseVerdict, commands: dict[int, str]) -> dict[str, Any]:
    return {
        "index": one.index,
        "case": text_of(one.drawn),
        "ranks": one.drawn.layout.world,
        "difference": one.difference,
        "redrawn": one.redrawn,
        "command": commands.get(one.index),
    }
