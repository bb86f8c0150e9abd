"""How people see the pages' colours: contrast (WCAG 2), and CIE L*a*b* of what is left of a colour without the eye's
receptors for green (Machado, Oliveira and Fernandes 2009, table 1, severity 1)."""

DEUTERANOPIA = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))
XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
WHITE = (0.9505, 1.0, 1.089)


def linear(colour: str) -> tuple[float, ...]:
    """Of `#rrggbb`: red, green and blue as light, 0 to 1."""
    values = [int(colour.removeprefix("#")[start : start + 2], 16) / 255 for start in (0, 2, 4)]
    return tuple(v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)


def contrast(ink: str, paper: str) -> float:
    """1 (equal) to 21 (black on white)."""
    low, high = sorted(sum(w * c for w, c in zip(XYZ[1], linear(each), strict=True)) for each in (ink, paper))
    return (high + 0.05) / (low + 0.05)


def deuteranopia(colour: str) -> tuple[float, float, float]:
    """L*, a*, b*."""
    seen = [min(1.0, max(0.0, _dot(row, linear(colour)))) for row in DEUTERANOPIA]
    x, y, z = (_root(_dot(row, seen) / white) for row, white in zip(XYZ, WHITE, strict=True))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _dot(row: tuple[float, ...], values: list[float] | tuple[float, ...]) -> float:
    return sum(a * b for a, b in zip(row, values, strict=True))


def _root(share: float) -> float:
    return share ** (1 / 3) if share > 0.008856 else 7.787 * share + 16 / 116
