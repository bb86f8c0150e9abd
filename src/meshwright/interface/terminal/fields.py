"""Figures of a run as text, the same in the live panel and in log lines."""

from collections import deque

from meshwright.spec.layout.layout import Layout
from meshwright.spec.units import GIB, count, duration, many
from meshwright.training.step.watch import EvalMetrics, RunInfo, StepMetrics, Summary


class Pace:
    """Time left, from the wall time of the last steps, which includes evaluation and saving."""

    def __init__(self, steps: int, window: int = 64) -> None:
        self.steps = steps
        # Only the last steps: the first ones compile, and a batch ramp makes later ones longer.
        self._seen: deque[tuple[int, float]] = deque(maxlen=window)

    def seen(self, step: int, now_s: float) -> None:
        """Record that `step` ended at `now_s`."""
        self._seen.append((step, now_s))

    def left_s(self, otherwise_s: float) -> float:
        """Return the seconds to the last step. After one step, each is assumed to take `otherwise_s`."""
        (first, began), (last, now) = self._seen[0], self._seen[-1]
        step_s = (now - began) / (last - first) if last > first else otherwise_s
        return max(0, self.steps - last) * step_s


def opening(info: RunInfo) -> list[tuple[str, str]]:
    """Return the lines printed once at the start, as (label, sentence)."""
    plan = info.plan
    rows = [
        ("model", f"{plan.model.name}, {count(info.parameters)} parameters, {plan.recipe.precision}, on {info.device}"),
        ("data", _data(info)),
        *([("layout", layout_line(plan.layout))] if plan.layout.world > 1 else []),
        ("batch", info.batch_equation),
        ("run", f"{plan.run}, {_steps(info)} of {plan.recipe.sequence} tokens a sequence"),
    ]
    return [*rows, *info.foreseen, *(("note", note) for note in info.notes)]


def _data(info: RunInfo) -> str:
    """Describe the text, its tokens, and how often the run reads it."""
    from meshwright.data.report import describe_times

    data = info.plan.data
    name = many(len(data.mixture), "source") if data.mixture else data.path
    text = f"{name}, {count(info.train_tokens)} tokens of {info.bytes_per_token:.2f} bytes"
    if data.mixture or data.form == "samples":  # the lines of sources and of rows say how often each is read
        return text
    return f"{text}, {describe_times(info.run_tokens / max(1, info.train_tokens))}"


def layout_line(layout: Layout) -> str:
    """Return `8 ranks = dp_shard 2 x tp 2 (sp) x pp 2 (1f1b), zero 1`: the axes in use and their settings."""
    parts = [
        f"{axis} {degree}{_how(layout, axis)}"
        for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")
        if (degree := getattr(layout, axis)) > 1
    ]
    experts = f", ep {layout.ep}" if layout.ep > 1 else ""
    layers = f" ({many(layout.recompute_layers, 'layer')} of a stage)" if layout.recompute_layers else ""
    recompute = "" if layout.recompute == "none" else f", recompute {layout.recompute}{layers}"
    return f"{many(layout.world, 'rank')} = {' x '.join(parts)}{experts}, zero {layout.zero}{recompute}"


def _how(layout: Layout, axis: str) -> str:
    if axis == "tp":
        return " (sp)" if layout.sp else ""
    if axis == "cp":
        return f" ({layout.context})"
    if axis == "pp":
        return f" ({layout.schedule}{f', vp {layout.vp}' if layout.vp > 1 else ''})"
    return ""


def _steps(info: RunInfo) -> str:
    if info.first_step >= info.steps:
        return f"all {many(info.steps, 'step')} done"
    if not info.first_step:
        return many(info.steps, "step")
    return f"continued after step {info.first_step}: steps {info.first_step + 1} to {info.steps}"


def memory(metrics: StepMetrics, device: str) -> str:
    """Return the memory in use.

    On a GPU that is allocated and reserved memory, on a CPU all of the process with Python and torch.
    """
    if device.startswith("CPU"):
        return f"{metrics.allocated_bytes / GIB:.2f} GiB (process)"
    return f"{metrics.allocated_bytes / GIB:.2f}/{metrics.reserved_bytes / GIB:.2f} GiB"


def data_wait(metrics: StepMetrics) -> str:
    """Return the share of the step spent waiting for data."""
    share = metrics.data_wait_seconds / metrics.step_seconds if metrics.step_seconds > 0 else 0.0
    return f"{100 * share:.1f}%"


def utilization(metrics: StepMetrics) -> str:
    """Return the MFU by both conventions. Empty = the device's peak is unknown."""
    shares = (("causal", metrics.mfu_causal), ("full", metrics.mfu_full))
    parts = [f"{100 * value:.1f}% {name}" for name, value in shares if value is not None]
    hfu = f", HFU {100 * metrics.hfu:.1f}%" if metrics.hfu is not None else ""
    return "MFU " + ", ".join(parts) + hfu if parts else ""


def extras(metrics: StepMetrics, info: RunInfo) -> list[tuple[str, str]]:
    """Return (label, value) of figures that only some runs have."""
    figures = [("batch", str(metrics.global_batch))] if info.plan.recipe.batch_ramp else []
    figures += [(name.replace("_", " "), f"{value:.4g}") for name, value in metrics.figures.items()]
    if metrics.skipped is not None:
        figures.append(("skipped", f"({metrics.skipped}, {metrics.skipped_steps or 1} so far)"))
    if metrics.pause_seconds is not None:
        figures.append(("pause", duration(metrics.pause_seconds)))
    if metrics.noise_scale_tokens is not None:
        figures.append(("noise scale", f"{count(metrics.noise_scale_tokens)} tokens"))
    if metrics.balance_loss is not None:
        figures.append(("balance", f"{metrics.balance_loss:.3f}"))
    if metrics.loss_scale is not None:
        figures.append(("loss scale", f"{metrics.loss_scale:g}"))
    return figures


def held_out(metrics: EvalMetrics) -> str:
    """Return an evaluation in one phrase."""
    parts = [f"loss {metrics.loss:.4f}"]
    if metrics.perplexity is not None and metrics.bits_per_byte is not None:
        parts += [f"perplexity {metrics.perplexity:.4g}", f"{metrics.bits_per_byte:.3f} bits per byte"]
    parts += [f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.figures.items()]
    roles = metrics.roles or {}
    by_role = f"; {', '.join(f'{name} {role.loss:.4f}' for name, role in roles.items())}" if len(roles) > 1 else ""
    by_source = "".join(f"; {source.path} {source.loss:.4f}" for source in metrics.sources or ())
    return f"{', '.join(parts)} on {count(metrics.tokens)} tokens{by_source}{by_role}"


def closing(summary: Summary, device: str) -> str:
    """Return one line on how the run ended."""
    if summary.stopped == "done" and not summary.tokens_per_second:
        done = f"the run is at step {summary.step}, and the plan has {many(summary.steps, 'step')}"
        return f"nothing was left to train: {done}"
    end = "trained" if summary.stopped == "done" else f"{summary.stopped} after"
    parts = [f"{end} {summary.step} of {many(summary.steps, 'step')}"]
    if 0 < summary.process_steps < summary.step:  # resumed: earlier steps may be of another machine
        done = f"{many(summary.process_steps, 'step')} now, {count(summary.process_tokens)} tokens"
        parts.append(f"{done} in {duration(summary.process_seconds)}")
    else:
        parts.append(f"{count(summary.tokens)} tokens in {duration(summary.seconds)} of steps")
    parts.append(f"{count(summary.tokens_per_second)} tokens/s{_steady(summary)}")
    if summary.paused_seconds:
        parts.append(f"{duration(summary.paused_seconds)} more for evaluation, samples and checkpoints")
    if summary.malformed_rows:
        parts.append(f"{many(summary.malformed_rows, 'malformed row')} left out")
    measured = "process" if device.startswith("CPU") else "tensors"
    parts.append(f"peak {summary.peak_allocated_bytes / GIB:.2f} GiB ({measured})")
    if summary.bits_per_byte is not None:
        parts.append(f"{summary.bits_per_byte:.3f} bits per byte")
    closed = ", ".join(parts)
    # Of one process the figures above tell the same.
    several = summary.goodput is not None and summary.goodput.processes > 1
    return f"{closed}\n{summary.goodput.words}" if summary.goodput is not None and several else closed


def _steady(summary: Summary) -> str:
    """Return the rate without steps that waited for a compiler, if there were any."""
    if summary.steady_tokens_per_second is None:
        return ""
    steps = "the first step" if summary.starting_steps == 1 else f"{summary.starting_steps} steps that compiled"
    return f" ({count(summary.steady_tokens_per_second)} without {steps}, {duration(summary.starting_seconds)})"
