"""Quantize a few numbers by absmax and by zero-point, with the scale, the zero, the codes and what is lost.

    python examples/linear_quantization.py [15 0.1 0.02 1.0 0.01] [--bits 8]

A code q stands for r = S (q - Z). Absmax has Z = 0 and needs codes of both signs. Zero-point covers the range from the
smallest to the largest number, zero included.
"""

import argparse

import torch

from meshwright.kernels.quantized.rounding import absmax, zero_point


def main() -> None:
    """Print a table for each method."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("numbers", nargs="*", type=float, default=[15, 0.1, 0.02, 1.0, 0.01])
    parser.add_argument("--bits", type=int, choices=range(2, 9), default=8)
    options = parser.parse_args()
    numbers = torch.tensor([options.numbers])
    for name, method in (("absmax", absmax), ("zero-point", zero_point)):
        coded = method(numbers, options.bits)
        restored = coded.restored()
        print(f"{name}: S = {coded.scale.item():.5g}, Z = {int(coded.zero.item())}; half a step is "
              f"{coded.scale.item() / 2:.3g}")  # fmt: skip
        print(f"{'r':>10}{'q':>8}{'S (q - Z)':>12}{'lost':>12}")
        for number, code, back in zip(numbers[0], coded.codes[0], restored[0], strict=True):
            print(f"{number:>10.5g}{code:>8}{back:>12.5g}{abs(number - back):>12.3g}")
        print()


if __name__ == "__main__":
    main()
