"""Amounts as people write them: tokens as 15T, times as 30d."""

from meshwright.spec.errors import ArgumentError

SCALES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}

SECONDS = {"d": 86_400.0, "h": 3600.0, "min": 60.0, "w": 604_800.0}

MOST_S = 1e10


def tokens_of(amount: str | float | None, name: str = "tokens") -> float:
    """Return the number of 15T, 300B or a plain number; None gives 0. Raises ArgumentError for anything else."""
    if amount is None:
        return 0.0
    text = str(amount)
    scale = SCALES.get(text[-1:].upper(), 1.0)
    try:
        number = float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        number = -1.0
    if not 1 <= number < 1e18:
        raise ArgumentError(name, amount, "must be a number of 1 or more and below 10**18, as 15T or 300B")
    return number


def tokens_word(tokens: float) -> str:
    """Return the shortest word that `tokens_of` reads as this number: 1T, 1.5B, 1234567."""
    words = [f"{tokens:.17g}", *(f"{tokens / scale:.9g}{letter}" for letter, scale in SCALES.items())]
    return min((word for word in words if float(word.rstrip("KMBT")) >= 0.1 and tokens_of(word) == tokens), key=len)


def seconds_of(amount: str | float | None, name: str = "deadline") -> float:
    """Return the seconds of 30d, 2w, 12h, 90min, or a number of days; None gives infinity.

    Raises ArgumentError for anything else.
    """
    if amount is None:
        return float("inf")
    text = str(amount).strip().lower()
    unit = next((unit for unit in sorted(SECONDS, key=len, reverse=True) if text.endswith(unit)), "")
    try:
        number = float(text.removesuffix(unit)) * SECONDS[unit or "d"]
    except ValueError:
        number = -1.0
    if not 0 < number < MOST_S:
        raise ArgumentError(name, amount, "must be a time above 0, as 30d, 2w, 12h or 90min")
    return number
