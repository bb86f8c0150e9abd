"""Units and formats of printed numbers. Inside the program: bytes, seconds, FLOP, tokens."""

from math import isfinite

MIB = 2**20
GIB = 2**30
GB = 10**9


def gib(num_bytes: float) -> str:
    """Format memory in GiB (2**30), or in MiB below a tenth of one."""
    if abs(num_bytes) < GIB / 10:
        return f"{num_bytes / MIB:.1f} MiB"
    return f"{num_bytes / GIB:.2f} GiB"


def short_gib(num_bytes: float) -> str:
    """Format memory as `gib` does, with one decimal from 10 GiB on: plans are not precise to the MiB."""
    return f"{num_bytes / GIB:,.1f} GiB" if abs(num_bytes) >= 9.995 * GIB else gib(num_bytes)


def text_size(num_bytes: float) -> str:
    """Format the size of a text in MiB, or in KiB below one."""
    return f"{num_bytes / MIB:.2f} MiB" if num_bytes >= MIB else f"{num_bytes / 1024:.1f} KiB"


def step_time(seconds: float) -> str:
    """Format seconds of a step with four digits, to tell layouts apart that differ by a tenth of a percent."""
    # From here on three digits, as of the range next to it, would round up to 1000 ms.
    if seconds < 0.9995:
        # "#" keeps trailing zeros.
        return f"{1e3 * seconds:#.4g} ms"
    return f"{seconds:#.4g} s" if seconds < 999.95 else f"{seconds:,.0f} s"


def count(number: float) -> str:
    """Format a count with K, M, B, T (powers of 1000) and three digits: parameters, tokens, FLOP."""
    if not isfinite(number):
        return str(number)
    # From 0.9995 on, three digits would round up to the next unit.
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= size * 0.9995:
            return f"{number / size:.3g}{letter}" if abs(number) < 999.5 * size else f"{number / size:.0f}{letter}"
    return f"{number:.0f}" if number == int(number) else f"{number:.3g}"


def duration(seconds: float) -> str:
    """Format a time with its unit: 4.2 ms, 0.4 s, 12 s, 3 min 05 s, 2 h 04 min, 3 d 4 h, or unknown if not finite."""
    if not isfinite(seconds):
        return "unknown"
    if 0 < seconds < 0.0995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    # rounded before it is split, or 59.7 s would end as 60 s after the minutes
    whole = round(seconds)
    minutes, secs = divmod(whole, 60)
    hours, mins = divmod(minutes, 60)
    days, hrs = divmod(hours, 24)
    if days:
        return f"{days} d {hrs} h"
    if hours:
        return f"{hours} h {mins:02d} min"
    if minutes:
        return f"{minutes} min {secs:02d} s"
    return f"{whole} s"


def many(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 rank`, `3 ranks`. `plural` is needed if it is more than an added s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
