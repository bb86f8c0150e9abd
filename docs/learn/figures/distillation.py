"""A teacher's next token at several temperatures, a student of limited form against it, its loss and gradient."""

from typing import Any

import torch

from meshwright.kernels.loss.linear_divergence import divergence_of

TITLE = "A student that can only be one hill"
TOKENS = ("blue", "grey", "dark", "clear", "red", "green", "seven")
TEACHER = (3.0, 1.5, -1.0, -2.0, 0.0, 2.6, 1.0)
"""Logits with two hills: the sky is blue, but this text may be of an aurora."""
TEMPERATURES = (0.5, 1.0, 2.0, 4.0, 8.0)
CENTRES = tuple(half / 2 for half in range(13))
WIDTHS = (0.6, 1.0, 1.5, 2.5)
BETAS = {"forward KL": 0.0, "between (beta 0.5)": 0.5, "reverse KL": 1.0}


def student_logits(centre: float, width: float) -> torch.Tensor:
    """Logits of a student whose distribution is one hill, as a small model's may be."""
    return -((torch.arange(len(TOKENS)) - centre) ** 2) / (2 * width**2)


def state(centre: float, width: float, temperature: float, beta: float) -> list[Any]:
    """Return [probabilities of the student, T^2 D in nats, gradient by its logits]."""
    logits = student_logits(centre, width).double().requires_grad_()
    ours = (logits / temperature).log_softmax(-1)
    theirs = (torch.tensor(TEACHER, dtype=torch.float64) / temperature).log_softmax(-1)
    loss = divergence_of(ours[None], theirs[None], beta).sum() * temperature**2
    loss.backward()
    assert logits.grad is not None
    return [rounded(ours.exp()), round(float(loss.detach()), 4), rounded(logits.grad)]


def rounded(x: torch.Tensor) -> list[float]:
    """Return numbers with four digits, which a page can carry."""
    return [round(number, 4) for number in x.detach().tolist()]


def data() -> dict[str, Any]:
    """Return the teacher by temperature, and each student by its settings joined with a bar."""
    theirs = torch.tensor(TEACHER, dtype=torch.float64)
    return {
        "tokens": TOKENS, "temperatures": TEMPERATURES, "centres": CENTRES, "widths": WIDTHS,
        "betas": list(BETAS),
        "teacher": {f"{heat:g}": rounded((theirs / heat).softmax(-1)) for heat in TEMPERATURES},
        "students": {
            f"{centre:g}|{width:g}|{temperature:g}|{name}": state(centre, width, temperature, beta)
            for centre in CENTRES for width in WIDTHS for temperature in TEMPERATURES for name, beta in BETAS.items()
        },
    }  # fmt: skip
