"""Newton-Schulz iteration: a matrix U S V' becomes about U V', by products alone.

Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon. Five times X <- a X + (b X X' + c (X X')^2) X, from
X / |X|. The coefficients make the slope at 0 large and are not meant to converge. A singular value above 0.002 of |X|
ends between 0.68 and 1.21, smaller ones are multiplied by up to 485.

In bf16 each product is rounded to 2**-9. For random matrices the result is 1 % of its length away from fp64's, in fp32
1e-6 to 1e-5 (tests/kernels/test_orthogonalize.py).
"""

import torch
from torch import Tensor

from meshwright.kernels.linear.linear import needs_wide
from meshwright.spec.memory.matrix_exchange import ITERATIONS

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalized(x: Tensor, epsilon: float) -> Tensor:
    """Orthogonalize each of N matrices x (N, R, C) in its own dtype. x is consumed.

    `epsilon`: least norm to divide by, which protects matrices of zeros. Where 16-bit products are emulated, it runs in
    fp32 and one matrix at a time.
    """
    if needs_wide(x):
        for matrix in x:
            # One at a time, so the fp32 copies of the others need no memory.
            matrix.copy_(orthogonalized(matrix[None].float(), epsilon)[0])
        return x
    a, b, c = COEFFICIENTS
    # X X' of the wider form is the smaller square.
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x.div_(norms(x).clamp_(min=epsilon))
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def norms(x: Tensor) -> Tensor:
    """Return the Frobenius norms (N, 1, 1) of x (N, R, C), which torch sums in fp32 at least."""
    lengths: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return lengths


def orthogonalized_reference(x: Tensor, epsilon: float) -> Tensor:
    """Orthogonalize one matrix at a time and out of place."""
    a, b, c = COEFFICIENTS
    orthogonal = []
    for matrix in x:
        y = matrix / norms(matrix[None])[0].clamp(min=epsilon)
        for _ in range(ITERATIONS):
            gram = y @ y.T
            y = a * y + (b * gram + c * (gram @ gram)) @ y
        orthogonal.append(y)
    return torch.stack(orthogonal) if orthogonal else x.clone()
