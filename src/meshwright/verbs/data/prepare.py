"""`meshwright data prepare [PLAN.yaml] [KEY=VALUE ...] -o STORE`: text into a token store."""

import re
from pathlib import Path

from meshwright import planfile
from meshwright.data.stored.encoding import Prepared, prepare_store
from meshwright.interface.planning.plan_reading import read_folder
from meshwright.interface.terminal.screen_text import console, print_json
from meshwright.spec.errors import ArgumentError
from meshwright.spec.units import count, many
from meshwright.verbs.data.command import encoding_bar


def prepare(
    plan: Path | None,
    overrides: list[str],
    *,
    out: str,
    part: str,
    processes: int | None,
    shard_tokens: int,
    json: bool,
) -> None:
    """Encode a part of the text, and say what the store has and lacks. `plan`: None = the default plan."""
    if not out:
        raise ArgumentError("out", rule="is missing", remedy="name the folder or URL of the token store")
    numbers = re.fullmatch(r"(\d{1,6})/(\d{1,6})", part)
    if numbers is None or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise ArgumentError("part", part, "is no part of a whole", "give 1/1, or 1/8 to 8/8 on eight machines")
    for name, number in (("processes", processes), ("shard_tokens", shard_tokens)):
        if number is not None and number < 1:
            raise ArgumentError(name, number, "must be 1 or more")
    data = planfile.read(plan, overrides, read_folder=read_folder).data
    with encoding_bar(console(json=True)) as advance:
        prepared = prepare_store(
            data, out, part=(int(numbers[1]), int(numbers[2])), processes=processes, shard_tokens=shard_tokens,
            progress=advance,
        )  # fmt: skip
    if json:
        print_json(prepared)
    else:
        print(_sentence(prepared))


def _sentence(prepared: Prepared) -> str:
    encoded = f"{many(prepared.encoded, 'unit')} of {prepared.units:,} encoded now"
    if prepared.missing:
        part = f"part {prepared.part[0]}/{prepared.part[1]}"
        return f"{prepared.store}: {encoded}; {part} is done, and other parts still have {prepared.missing:,} to encode"
    lines = [
        f"{prepared.store}: {encoded}; the store is finished: {count(prepared.train_tokens)} tokens in "
        f"{many(prepared.train_shards, 'shard')}, {count(prepared.held_out_tokens)} held out, of "
        f"{prepared.documents:,} documents"
    ]
    if prepared.malformed_rows:
        lines.append(f"{many(prepared.malformed_rows, 'row')} left out as malformed")
    return "\n".join([*lines, f"train from it with data={prepared.store}"])
