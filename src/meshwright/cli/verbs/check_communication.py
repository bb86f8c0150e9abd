"""`meshwright dryrun --check`: whether the communication of a plan can deadlock, over the traces of all its ranks."""

from typing import TYPE_CHECKING, Any

from meshwright.spec import Plan
from meshwright.spec.errors import UnsafeCommunication

if TYPE_CHECKING:
    from meshwright.observe.check.rules import Checked


def check_communication(plan: "Plan", *, device: str, load: float, whole: bool, json: bool) -> None:
    """Record all ranks, check them, print the answer. UnsafeCommunication where a rule is broken."""
    from meshwright.cli.terminal.output import console, print_json
    from meshwright.observe.check.recording import record_world
    from meshwright.observe.check.rules import check
    from meshwright.observe.dryrun.simulate import device_of

    device = device or device_of(plan)
    with console(json=json).status("check") as status:
        world = record_world(
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


def document(found: "Checked", device: str) -> dict[str, Any]:
    """The answer for programs."""
    return {
        "source": "check",
        "device": device,
        "ranks": found.ranks,
        "operations": found.operations,
        "groups": found.groups,
        "programs": found.programs,
        "violations": [{"rule": one.rule, "text": one.text} for one in found.violations],
    }
