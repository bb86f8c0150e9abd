"""How far layouts in bf16 (or fp8) are from one device in the same: figures behind the bands of `meshwright verify`.

python -m benchmarks.bf16_distance [fp8]
"""

import sys

from meshwright.observe.verify.feature_matrix import outcomes, trials
from meshwright.observe.verify.feature_names import FEATURES
from meshwright.observe.verify.one_device import BANDS, RankOutcome, assemble, distance


def distances(one: RankOutcome, ranks: list[RankOutcome]) -> dict[str, float]:
    """The largest relative difference of each kind that a band has a figure for."""
    whole = assemble(ranks)
    by_name = {name: distance(name, one, whole, BANDS["bf16"]) for name in one.tensors}
    return {
        "loss": max(abs(a - b) / a for rank in ranks for a, b in zip(one.losses, rank.losses, strict=True)),
        "norm": max(abs(a - b) / a for rank in ranks for a, b in zip(one.norms, rank.norms, strict=True)),
        "gradient": max(far for name, far in by_name.items() if " gradient of " in name),
        "weight": max(far for name, far in by_name.items() if " weight " in name),
    }


def main() -> None:
    """Every layout of the matrix in that precision, a line each, and the largest of all."""
    feature = "fp8" if "fp8" in sys.argv[1:] else "bf16"
    chosen = [one for one in trials([name for name in FEATURES if name != "compiled"])[0] if feature in one.features]
    largest: dict[str, float] = {}
    for trial, one, ranks in outcomes(chosen):
        found = distances(one, ranks)
        largest = {kind: max(value, largest.get(kind, 0.0)) for kind, value in found.items()}
        print(trial.title, *(f"{kind} {value:.1e}" for kind, value in found.items()), flush=True)
    print("largest:", *(f"{kind} {value:.1e}" for kind, value in largest.items()))


if __name__ == "__main__":
    main()
