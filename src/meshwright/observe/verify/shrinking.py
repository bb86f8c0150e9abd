"""Reduction of a failing case to the smallest one near it that fails too, one change at a time.

A case is its settings: keys and values as `case_text` writes them. A change leaves keys out, or makes a number smaller.
It is accepted if the case gets smaller, stays legal and still fails. The search ends when no change helps, or by time.
"""

from collections.abc import Callable, Iterator

from meshwright.observe.verify.case_text import DrawnCase, Settings, build_case, settings_of
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
"""Settings that are left out together, since leaving out one alone would break a rule."""
ALSO_LEFT_OUT = ((), ("zero",), ("ep",), ("ep", "zero"), ("ep", "sp"), ("ep", "sp", "zero"))
"""Settings that may have to be left out as well, smallest set first: they use ranks of those left out."""
LEFT_OUT_WITH_SMALLER = {
    "tp": ((), ("heads",), ("heads", "kv_heads"), ("sequence",), ("ep",)),
    "pp": ((), ("layers", "stages"), ("layers", "stages", "moe.first_dense"), ("global_batch", "batches")),
    "cp": ((), ("sequence",), ("ep",)),
    "dp_shard": ((), ("global_batch", "batches"), ("global_batch", "batches", "ep"), ("ep",)),
    "dp_replicate": ((), ("global_batch", "batches"), ("global_batch", "batches", "empty")),
    "vp": ((), ("layers", "stages"), ("stages",)),
    "moe.experts": ((), ("ep",), ("moe.top_k",), ("moe.groups", "moe.top_groups")),
}
"""Settings that may have to be left out when a number gets smaller."""
DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
PROPORTIONAL = (*DEGREES, "heads", "kv_heads", "sequence", "global_batch", "batches", "layers", "moe.experts")
"""Numbers that a degree divides: they get smaller in proportion with it."""
UNORDERED = ("seed", "overflow", "overflow_sequence", "zero")
"""Numbers of which a smaller one is not simpler."""


def shrink_case(
    drawn: DrawnCase, failing: Callable[[DrawnCase], DrawnCase | None], in_time: Callable[[], bool]
) -> DrawnCase:
    """Return the smallest failing case.

    Args:
        failing: Returns the failing case as it was run, or None if it passes.
        in_time: Returns True while there is time for another try.
    """
    progress = True
    tried: set[str] = set()
    while progress:
        progress = False
        for change in list(_changes(settings_of(drawn))):
            candidate = _build_or_none(change(settings_of(drawn)))
            if candidate is None or _size(candidate) >= _size(drawn) or repr(candidate) in tried:
                continue
            if not in_time():
                return drawn
            tried.add(repr(candidate))
            failing_case = failing(candidate)
            if failing_case is not None:
                drawn, progress = failing_case, True
    return drawn


def _size(drawn: DrawnCase) -> tuple[int, int, int, float]:
    """Return the size of a case: processes, then settings, then their numbers."""
    settings = settings_of(drawn)
    numbers = [value for key, value in settings.items() if type(value) in (int, float) and key not in UNORDERED]
    return drawn.layout.world, len(settings), sum(len(v) for v in settings.values() if type(v) is tuple), sum(numbers)


def _build_or_none(settings: Settings | None) -> DrawnCase | None:
    try:
        return None if settings is None else build_case(settings)
    except PlanError:
        return None


Change = Callable[[Settings], Settings | None]


def _changes(settings: Settings) -> Iterator[Change]:
    """Yield every change to try, largest first."""
    groups = [tuple(key for key in settings if key.startswith(part)) for part in PARTS]
    groups += [keys for keys in TOGETHER if set(keys) & settings.keys()]
    groups += [(key,) for key in settings if not any(key.startswith(part) for part in PARTS)]
    groups += [(key,) for key in settings if any(key.startswith(part) for part in PARTS)]
    for keys in filter(None, groups):
        yield _leave_out(keys)
    for degree in sorted({settings.get(key, 1) for key in DEGREES} - {1, 2}):
        for smaller in range(2, degree):
            yield _scale_down(degree, smaller)
    for key, setting in settings.items():
        if type(setting) is int and key not in UNORDERED:
            for smaller in sorted({1, 2, 3, setting // 2, setting - 1} - {0}):
                if smaller < setting:
                    yield _reduce(key, smaller)
        if type(setting) is tuple:
            for index in range(len(setting)):
                yield _shorten(key, index)


def _leave_out(keys: tuple[str, ...]) -> Change:
    def change(settings: Settings) -> Settings | None:
        for more in ALSO_LEFT_OUT:
            rest = {key: value for key, value in settings.items() if key not in (*keys, *more)}
            if len(rest) < len(settings) and _build_or_none(rest) is not None:
                return rest
        return None

    return change


def _reduce(key: str, number: int) -> Change:
    def change(settings: Settings) -> Settings | None:
        if settings.get(key, 0) <= number:
            return None
        for more in LEFT_OUT_WITH_SMALLER.get(key, ((),)):
            smaller = {name: old for name, old in settings.items() if name not in more} | {key: number}
            if _build_or_none(smaller) is not None:
                return smaller
        return None

    return change


def _scale_down(degree: int, smaller: int) -> Change:
    def scaled(number: int) -> int:
        return number // degree * smaller if number % degree == 0 else number

    def change(settings: Settings) -> Settings | None:
        changed = dict(settings)
        for key in set(PROPORTIONAL) & settings.keys():
            setting = settings[key]
            changed[key] = tuple(map(scaled, setting)) if isinstance(setting, tuple) else scaled(setting)
        return changed

    return change


def _shorten(key: str, index: int) -> Change:
    def change(settings: Settings) -> Settings | None:
        setting = settings.get(key, ())
        if len(setting) <= index + (len(setting) == 1):
            return None
        return settings | {key: setting[:index] + setting[index + 1 :]}

    return change
