"""`meshwright dryrun --check`: whether the communication of a plan can deadlock, over the traces of all its ranks."""

from dataclasses import asdict
from typing import Any

from meshwright.cli.terminal.output import console, print_json
from meshwright.observe.check import recording
from meshwright.observe.check.rules import Checked, check
from meshwright.observe.dryrun.simulate import device_of
from meshwright.spec import Plan
from meshwright.spec.errors import UnsafeCommunication


def check_communication(plan: Plan, *, device: str, load: float, whole: bool, json: bool) -> None:
    """Record all ranks, check them, print the answer. UnsafeCommunication where a rule is broken."""
    device = device or device_of(plan)
    with console(json=json).status("check") as status:
        world = recording.record_world(
            plan, device=device, load=load, whole=whole,
            progress=lambda done, of: status.update(f"check: {done} of {of} ranks"),
        )  # fmt: skip
        found = check(world)
    if json:
        print_json(document(found, device))
    else:
        print(found.sentence)
        for violation in found.violations:
            print(f"{violation.rule}: {violation.text}")
    if found.violations:
        first = found.violations[0]
        raise UnsafeCommunication(f"{found.sentence}; first: {first.rule}, {first.text.splitlines()[-1].strip()}")


def document(found: Checked, device: str) -> dict[str, Any]:
    """The answer for programs."""
    return {"source": "check", "device": device, **asdict(found)}
