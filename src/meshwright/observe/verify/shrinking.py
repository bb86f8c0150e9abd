"""From a case that fails to the smallest one near it that fails too, one change at a time.

A case is its settings: keys and values as `case_text` writes them. A change leaves keys out, or makes a number smaller.
It is kept where the case gets smaller, stays legal and still fails. When nothing can be changed any more, or time is
up, what is left is the answer.
"""

from collections.abc import Callable, Iterator

from meshwright.observe.verify.case_text import Drawn, Settings, drawn_from, settings_of
from meshwright.spec.errors import PlanError

PARTS = ("teacher.", "moe.", "mla.", "rope_scaling.")
TOGETHER = (
    ("pp", "vp", "schedule", "stages", "micro_batch"),
    ("cp", "context", "context_split"),
    ("dp_replicate",),
    ("dp_shard",),
    ("tp", "sp", "tp_chunks"),
    ("tp_chunks",),
    ("ep", "ep_chunks"),
    ("pp", "vp", "schedule", "stages"),
    ("vp", "schedule", "stages"),
    ("precision", "overflow", "overflow_sequence"),
    ("precision", "products", "overflow", "overflow_sequence", "master_weights"),
    ("overflow", "overflow_sequence"),
    ("window", "window_from_layer"),
    ("batches", "empty"),
    ("micro_batch", "global_batch", "batches", "empty"),
    ("global_batch", "batches"),
    ("heads", "kv_heads"),
    ("layers", "stages"),
    ("layers", "stages", "moe.first_dense"),
    ("positions", "head_dim"),
)
"""Settings that are left out at once, since one alone would break a rule."""
WITH_IT = ((), ("zero",), ("ep",), ("ep", "zero"), ("ep", "sp"), ("ep", "sp", "zero"))
"""What is left out as well, the least that is legal: it borrows its ranks from what is left out."""
WITH_LESS = {
    "tp": ((), ("heads",), ("heads", "kv_heads"), ("sequence",), ("ep",)),
    "pp": ((), ("layers", "stages"), ("layers", "stages", "moe.first_dense"), ("global_batch", "batches")),
    "cp": ((), ("sequence",), ("ep",)),
    "dp_shard": ((), ("global_batch", "batches"), ("global_batch", "batches", "ep"), ("ep",)),
    "dp_replicate": ((), ("global_batch", "batches"), ("global_batch", "batches", "empty")),
    "vp": ((), ("layers", "stages"), ("stages",)),
    "moe.experts": ((), ("ep",), ("moe.top_k",), ("moe.groups", "moe.top_groups")),
}
"""What is left out where a number gets smaller, for the same reason."""
DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
FOLLOW = (*DEGREES, "heads", "kv_heads", "sequence", "global_batch", "batches", "layers", "moe.experts")
"""Numbers that a degree divides: they get smaller in proportion with it."""
NO_SIZE = ("seed", "overflow", "overflow_sequence", "zero")
"""Numbers of which a smaller one is not simpler."""


def shrunk(drawn: Drawn, failing: Callable[[Drawn], Drawn | None], in_time: Callable[[], bool]) -> Drawn:
    """The smallest case found. `failing` gives a case that fails (as it was run), None for one that does not; `in_time`
    says whether there is time for another try."""
    progress = True
    tried: set[str] = set()
    while progress:
        progress = False
        for change in list(_changes(settings_of(drawn))):
            candidate = _legal(change(settings_of(drawn)))
            if candidate is None or _size(candidate) >= _size(drawn) or repr(candidate) in tried:
                continue
            if not in_time():
                return drawn
            tried.add(repr(candidate))
            found = failing(candidate)
            if found is not None:
                drawn, progress = found, True
    return drawn


def _size(drawn: Drawn) -> tuple[int, int, int, float]:
    """What makes a case small: processes, then settings, then their numbers."""
    settings = settings_of(drawn)
    numbers = [value for key, value in settings.items() if type(value) in (int, float) and key not in NO_SIZE]
    return drawn.layout.world, len(settings), sum(len(v) for v in settings.values() if type(v) is tuple), sum(numbers)


def _legal(settings: Settings | None) -> Drawn | None:
    try:
        return None if settings is None else drawn_from(settings)
    except PlanError:
        return None


Change = Callable[[Settings], Settings | None]


def _changes(settings: Settings) -> Iterator[Change]:
    """Every change that may be tried, those that take away most first."""
    groups = [tuple(key for key in settings if key.startswith(part)) for part in PARTS]
    groups += [keys for keys in TOGETHER if set(keys) & settings.keys()]
    groups += [(key,) for key in settings if not any(key.startswith(part) for part in PARTS)]
    groups += [(key,) for key in settings if any(key.startswith(part) for part in PARTS)]
    for keys in filter(None, groups):
        yield _leave_out(keys)
    for degree in sorted({settings.get(key, 1) for key in DEGREES} - {1, 2}):
        for smaller in range(2, degree):
            yield _in_proportion(degree, smaller)
    for key, value in settings.items():
        if type(value) is int and key not in NO_SIZE:
            for smaller in sorted({1, 2, 3, value // 2, value - 1} - {0}):
                if smaller < value:
                    yield _set(key, smaller)
        if type(value) is tuple:
            for place in range(len(value)):
                yield _shorten(key, place)


def _leave_out(keys: tuple[str, ...]) -> Change:
    def change(settings: Settings) -> Settings | None:
        for more in WITH_IT:
            left = {key: value for key, value in settings.items() if key not in (*keys, *more)}
            if len(left) < len(settings) and _legal(left) is not None:
                return left
        return None

    return change


def _set(key: str, value: int) -> Change:
    def change(settings: Settings) -> Settings | None:
        if settings.get(key, 0) <= value:
            return None
        for more in WITH_LESS.get(key, ((),)):
            smaller = {name: old for name, old in settings.items() if name not in more} | {key: value}
            if _legal(smaller) is not None:
                return smaller
        return None

    return change


def _in_proportion(degree: int, smaller: int) -> Change:
    def scaled(value: int) -> int:
        return value // degree * smaller if value % degree == 0 else value

    def change(settings: Settings) -> Settings | None:
        found = dict(settings)
        for key in set(FOLLOW) & settings.keys():
            value = settings[key]
            found[key] = tuple(map(scaled, value)) if isinstance(value, tuple) else scaled(value)
        return found

    return change


def _shorten(key: str, place: int) -> Change:
    def change(settings: Settings) -> Settings | None:
        value = settings.get(key, ())
        return settings | {key: value[:place] + value[place + 1 :]} if len(value) > place + (len(value) == 1) else None

    return change
