"""GGUF files in parts, as llama-gguf-split writes them: NAME-00001-of-00003.gguf. The first has the keys of the model;
each has its own tensors, and says which part it is of how many.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from meshwright.model.gguf.gguf_header import GGUFHeader, StoredBlocks, int_of, read_gguf_header
from meshwright.spec.errors import HubError

COUNT, NUMBER, TENSORS = "split.count", "split.no", "split.tensors.count"
NAME = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def read_gguf_parts(path: Path) -> GGUFHeader:
    """The header of a whole file, or of the first of its parts with the tensors of all. HubError: as read_gguf_header;
    another part than the first; a part that is not there, or is of another file."""
    first = read_gguf_header(path)
    count = int_of(first.keys.get(COUNT), 1)
    if count <= 1:
        return first
    found = NAME.fullmatch(path.name)
    number = int_of(first.keys.get(NUMBER), 0)
    if found is None or int(found["count"]) != count or int(found["number"]) != number + 1:
        raise HubError(
            f"{path} is part {number + 1} of {count}, and is not named so: parts are NAME-00001-of-{count:05}.gguf"
        )
    names = [path.with_name(f"{found['name']}-{one:05}-of-{count:05}.gguf") for one in range(1, count + 1)]
    if number:
        raise HubError(f"{path} is part {number + 1} of {count}: give the first, {names[0].name}")
    missing = [one.name for one in names if not one.is_file()]
    if missing:
        raise HubError(f"{path} has {count} parts, and {missing[0]} is not beside it: copy or download it")
    tensors = dict(first.tensors)
    for place, name in enumerate(names[1:], start=1):
        tensors |= _of_part(name, place, count, tensors)
    expected = int_of(first.keys.get(TENSORS), len(tensors))
    if len(tensors) != expected:
        raise HubError(
            f"{path} and its parts hold {len(tensors)} tensors, and {expected} belong there: a part is of "
            "another file. Download all parts again"
        )
    return replace(first, tensors=tensors)


def _of_part(path: Path, place: int, count: int, known: Mapping[str, StoredBlocks]) -> Mapping[str, StoredBlocks]:
    """Tensors of one more part."""
    header = read_gguf_header(path)
    said = int_of(header.keys.get(NUMBER), -1), int_of(header.keys.get(COUNT), -1)
    if said != (place, count):
        raise HubError(
            f"{path}: the header says part {said[0] + 1} of {said[1]}, and the file name says {place + 1} of "
            f"{count}: download the file again, under its own name"
        )
    twice = sorted(header.tensors.keys() & known.keys())
    if twice:
        raise HubError(f"{path} holds {twice[0]}, which a part before it holds: a part is of another file")
    return header.tensors
