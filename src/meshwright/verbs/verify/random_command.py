"""`meshwright verify --random` and `--case`: random cases compared with one device, and one case again."""

from collections.abc import Sequence
from typing import Any

from meshwright.interface.terminal.screen_text import print_json
from meshwright.spec.errors import OutsideTolerance, PlanError
from meshwright.spec.units import many
from meshwright.verbs.verify import random_run
from meshwright.verbs.verify.case_text import format_case, parse_case
from meshwright.verbs.verify.random_case import random_case
from meshwright.verbs.verify.random_run import CaseVerdict


def verify_random(number: int, seed: int, *, processes: int, device: str, json: bool, compiled: bool) -> None:
    """Try cases 0 .. number - 1 of a seed, and print a line each. Those that differ are shrunk."""
    cases = [random_case(seed, index, processes, compiled=compiled) for index in range(number)]
    verdicts = []
    for verdict in random_run.judge_cases(cases, device):
        verdicts.append(verdict)
        if not json:
            print(_line(verdict), flush=True)
    _end(verdicts, device=device, json=json, seed=seed)


def verify_case(text: str, *, device: str, json: bool, processes: int) -> None:
    """Try one case, with exactly the tokens that it names."""
    drawn = parse_case(text)
    if drawn.layout.world > processes:
        raise PlanError(f"--case: the layout has {drawn.layout.world} processes, and at most {processes} are allowed")
    verdict = random_run.judge_case(drawn, device)
    if not json:
        print(_line(verdict), flush=True)
    _end([verdict], device=device, json=json, seed=None)


def _line(verdict: CaseVerdict) -> str:
    ranks = many(verdict.drawn.layout.world, "rank")
    return f"{verdict.index}  {ranks}  {format_case(verdict.drawn)}: {verdict.difference or 'equal'}"


def _end(verdicts: Sequence[CaseVerdict], *, device: str, json: bool, seed: int | None) -> None:
    """Shrink what differs, and print the document or the commands. Raises OutsideTolerance if anything differs."""
    failed = [verdict for verdict in verdicts if verdict.difference]
    commands: dict[int, str] = {}
    for verdict in failed:
        # Only random cases are shrunk: a case that was named is the one to look at.
        small = random_run.smallest(verdict, device) if seed is not None else verdict
        commands[verdict.index] = f"meshwright verify --case '{format_case(small.drawn)}'"
        if not json and seed is not None:
            print(f"case {verdict.index}, made small: {small.difference}\n    {commands[verdict.index]}", flush=True)
    redrawn = sum(verdict.redrawn for verdict in verdicts)
    if json:
        print_json(
            {
                "layouts": len(verdicts),
                "different": len(failed),
                "seed": seed,
                "redrawn": redrawn,
                "results": [
                    _as_json(verdict, commands) for verdict in sorted(verdicts, key=lambda verdict: verdict.index)
                ],
            }
        )
    if failed:
        raise OutsideTolerance(
            f"{len(failed)} of {many(len(verdicts), 'case')} differ from one device; {failed[0].difference}"
        )
    if not json:
        redraws = (
            f"; drawn again {many(redrawn, 'time')}, since rounding decided too much on one device" if redrawn else ""
        )
        print(f"{many(len(verdicts), 'case')} equal one device{redraws}")


def _as_json(verdict: CaseVerdict, commands: dict[int, str]) -> dict[str, Any]:
    return {
        "index": verdict.index,
        "case": format_case(verdict.drawn),
        "ranks": verdict.drawn.layout.world,
        "difference": verdict.difference,
        "redrawn": verdict.redrawn,
        "command": commands.get(verdict.index),
    }
