"""What a run tells those who watch it: the Watcher protocol and the records it is given. No torch."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from meshwright.spec import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """What was found out about a run before it begins."""

    sentences: tuple[tuple[str, str], ...] = ()
    """(label, what is said about it): of the plan, of the dry run."""
    dry_run: Mapping[str, Any] | None = None
    """The document of a dry run, kept in the run folder; None = there was none."""
    with_documents: Callable[[float], tuple[tuple[str, str], ...]] | None = None
    """Further sentences, for packed documents of so many tokens (data.windows.Sequences.document_tokens)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What is known before the first step."""

    plan: Plan
    parameters: int
    device: str
    """For people: "CPU, 2 threads" or the GPU's name."""
    first_step: int
    """Steps already done when this process begins: 0 for a fresh run."""
    steps: int
    batch_equation: str
    """`global batch 32 sequences = micro-batch 8 x accumulation 4 x dp 1`."""
    train_tokens: int
    """Tokens of the training text, once through."""
    run_tokens: int
    """Tokens that the whole run reads."""
    bytes_per_token: float
    """Of the held-out text: turns nats per token into bits per byte."""
    peak_flop_per_s: float | None
    """What MFU is measured against; None = unknown, and MFU is not printed."""
    losses: tuple[float, ...] = ()
    """Of the last logged steps before first_step, for a curve that goes on where it was."""
    foreseen: tuple[tuple[str, str], ...] = ()
    """(label, sentence): what plan and dry run say."""
    notes: tuple[str, ...] = ()
    """Whatever else a person should read once, a sentence each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step. None = not measured in this step, or not known on this machine."""

    step: int
    """Counts from 1: the number of steps done."""
    loss: float
    """Nats per valid token of the step."""
    grad_norm: float
    """Before clipping."""
    lr: float
    tokens: int
    """Cumulative over the whole run."""
    tokens_per_second: float
    seconds: float
    """Cumulative time of all steps."""
    step_seconds: float
    """From the end of the step before to the end of this one, by the clock of the device; without pause_seconds."""
    data_wait_seconds: float
    """The host's wait for the batch; on a GPU the step before may still be computing meanwhile."""
    allocated_bytes: int
    """Peak of memory in live tensors (GPU), or resident memory of the process (CPU)."""
    reserved_bytes: int
    """Held by the allocator."""
    pause_seconds: float | None = None
    """Evaluation, samples and checkpoint between the step before and this one; None = there was nothing."""
    mfu_causal: float | None = None
    """Share of the peak, attention counted by half."""
    mfu_full: float | None = None
    hfu: float | None = None
    """With recomputation counted."""
    noise_scale_tokens: float | None = None
    """Gradient noise scale (McCandlish et al. 2018) in tokens."""
    balance_loss: float | None = None
    """Load-balance loss of a mixture of experts, before its weight."""
    loss_scale: float | None = None
    """fp16 only."""
    global_batch: int
    """Sequences of this step."""
    skipped: str | None = None
    """Why the step changed no weight: `overflow` (fp16), `non-finite`, `spike`; None = it did."""
    skipped_steps: int | None = None
    """Steps of the run so far that were skipped; None = none."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What the objective reports beside the loss, by name: of pairs rewards, margin and accuracy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceScore:
    """An evaluation on what is held out of one source of a mixture."""

    path: str
    loss: float
    """Nats per token; of pairs the mean of the objective."""
    bits_per_byte: float | None
    """None = the objective is not cross-entropy."""
    tokens: int
    """Tokens that were scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLoss:
    """Of what one role says on held-out conversations."""

    loss: float
    """Nats per token."""
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalMetrics:
    """One evaluation on held-out text."""

    step: int
    loss: float
    """Nats per token; of pairs the mean of the objective."""
    perplexity: float | None
    """None = the objective is not cross-entropy."""
    bits_per_byte: float | None
    tokens: int
    """Tokens that were scored."""
    seconds: float
    figures: Mapping[str, float] = field(default_factory=dict)
    """As StepMetrics."""
    sources: tuple[SourceScore, ...] | None = None
    """Of a mixture: each source by itself, of which the figures above are means by weight. None = there is one text."""
    roles: Mapping[str, RoleLoss] | None = None
    """Of conversations in which several roles are trained, the part of each."""


def numbers(metrics: StepMetrics | EvalMetrics) -> dict[str, Any]:
    """Every field of a record that is known, by name; figures among them."""
    found = asdict(metrics)
    found |= found.pop("figures")
    return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a run ended."""

    step: int
    steps: int
    loss: float
    """Of the last step, nats per token."""
    eval_loss: float | None = None
    """Of the last evaluation; None = there was none."""
    best_eval_loss: float | None = None
    best_step: int | None = None
    bits_per_byte: float | None = None
    """Of the last evaluation."""
    tokens: int
    seconds: float
    """Of the steps of the whole run: evaluations and checkpoints are not in it."""
    process_steps: int = 0
    """Steps of this process, fewer than `step` in a run that was resumed."""
    process_tokens: int = 0
    process_seconds: float = 0.0
    tokens_per_second: float
    """process_tokens / process_seconds; 0 = no step was left for this process."""
    starting_steps: int = 0
    """The first step of this process, and those for which code was compiled."""
    starting_seconds: float = 0.0
    """Of these steps."""
    steady_tokens_per_second: float | None = None
    """Of all other steps of this process; None = there was no other."""
    paused_seconds: float = 0.0
    """Evaluations, samples and checkpoints of this process, which are not in seconds."""
    saving_seconds: float = 0.0
    """What steps and the end waited for checkpoints."""
    malformed_rows: int = 0
    """Of the data, which data.malformed=skip left out."""
    peak_allocated_bytes: int
    checkpoint: Path | None
    """The last one; None = none was written."""
    stopped: str
    """`done`, or why it ended before: `interrupted` (Ctrl-C), `terminated` (SIGTERM)."""


@runtime_checkable
class Watcher(Protocol):
    """Whoever wants to see a run: a display, a file, a tracking service. Called on rank 0, between steps.
    One that inherits from it looks away from what it does not override."""

    def started(self, info: RunInfo) -> None:
        """Once, before the first step."""
        return

    def stepped(self, metrics: StepMetrics) -> None:
        """After every logged step."""
        return

    def evaluated(self, metrics: EvalMetrics) -> None:
        """After an evaluation on held-out text."""
        return

    def saved(self, step: int, path: Path) -> None:
        """Once a checkpoint is committed."""
        return

    def ended(self, summary: Summary) -> None:
        """Once, when the run ends: finished or interrupted with a checkpoint. Not called after an exception."""
        return
