"""Whether a dry run fits, in words."""

from meshwright.observe.dryrun.dryrun_document import Room, reserve_bytes
from meshwright.observe.dryrun.simulate import DryRun
from meshwright.spec.schedule import phase_words
from meshwright.spec.units import gib


def unfit(found: DryRun, room: Room, needed_bytes: int) -> str:
    """One line: how much is missing, of what."""
    worst = found.worst
    kind = max(worst.kinds, key=worst.kinds.__getitem__)
    return (
        f"the dry run of rank {worst.rank} needs {needed(found)} ({phase_words(worst.when)}; most of it "
        f"{kind}: {gib(worst.kinds[kind])}){judged(found, room, needed_bytes)}: `meshwright plan` names layouts that "
        "fit"
    )


def judged(found: DryRun, room: Room, needed_bytes: int) -> str:
    """`; 2 ranks need 4.0 GiB and 21.9 GiB of this machine's 23.5 GiB are usable`; empty where no room is known."""
    if not room.usable_bytes:
        return ""
    ranks = found.plan.layout.world // room.machines if room.shared else 1
    together = f"{ranks} ranks need {gib(needed_bytes)}, " if ranks > 1 else ""
    whole = f"'s {gib(room.total_bytes)}" if room.total_bytes else ""
    return (
        f"; {together}{gib(room.usable_bytes)} of {room.of}{whole} {'are available' if room.shared else 'are usable'}"
    )


def needed(found: DryRun) -> str:
    """The peak of its tensors, and what comes to it."""
    reserve = reserve_bytes(found.device)
    return gib(found.worst.peak_bytes) + (f" and {gib(reserve)} of workspaces" if reserve else "")
