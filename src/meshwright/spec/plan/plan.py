"""Plan: model, recipe, layout and cluster, together with the data and the run folder.

Also the chat formats that `data.template` names, and the nearest layout or number of processes where the two do not
match.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Literal

from meshwright.spec.errors import IllegalLayout, PlanError, argument, printable
from meshwright.spec.layout.cluster import Cluster
from meshwright.spec.layout.layout import AXES, Layout, layers_of_stages
from meshwright.spec.model.shape import NO_TARGETS, ModelShape
from meshwright.spec.recipe.recipe import Recipe, rollback_problem
from meshwright.spec.rules.legal import (
    batch_refusals,
    distillation_violations,
    divisors,
    layout_violations,
    position_refusals,
    preference_violations,
)
from meshwright.spec.units import many

EOS: Final = "eos_token"
"""Stand-in for the tokenizer's own end-of-text token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """One format. `file` is its template in meshwright/data/templates."""

    file: str
    turn_end: str
    """Token that ends an answer, or EOS."""
    tokens: tuple[str, ...] = ()
    """Other tokens that the vocabulary must have, each as one id."""


CHAT_FORMATS: Final = {
    "chatml": ChatFormat(file="chatml.jinja", turn_end="<|im_end|>", tokens=("<|im_start|>",)),
    "llama-3": ChatFormat(
        file="llama-3.jinja",
        turn_end="<|eot_id|>",
        tokens=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    ),
    "llama-2": ChatFormat(file="llama-2.jinja", turn_end=EOS),
    "mistral": ChatFormat(
        file="mistral.jinja", turn_end=EOS, tokens=("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
    ),
    "mistral-v1": ChatFormat(file="mistral-v1.jinja", turn_end=EOS),
    "deepseek-v3": ChatFormat(
        file="deepseek-v3.jinja", turn_end=EOS, tokens=("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>")
    ),
}
"""Name -> format. docs/tuning.md lists the models of each."""


ROLES = ("system", "user", "assistant", "tool")
"""Speakers of a conversation."""
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
"""Start of a URL, with its scheme."""
RANDOM = "random"
"""Value of `Plan.init` for a run with random initial weights."""


STDLIB = "stdlib"
"""Value of `Data.path` for the source of the Python standard library."""
TEXT: Final = "text"
SAMPLES: Final = "samples"
"""Values of `Data.form`."""
LEAST_SHARE = 1 / 2**16
"""Smallest share in a mixture: shares are rounded to this fraction (data/sequences/numbered_rows.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSource:
    """One of several sources in a mixture."""

    path: str
    """A path as in data.path."""
    weight: float
    """Its share of the trained tokens, or of the pairs, relative to the other weights: 7 and 3 are 70 % and 30 %."""
    text_field: str = ""
    """Field of its .jsonl and .parquet rows; empty = data.text_field."""

    def __post_init__(self) -> None:
        if not self.path:
            raise PlanError("data.mixture: a path is empty: give a file, a folder, a glob, or stdlib")
        if not 0 < self.weight < math.inf:
            raise PlanError(
                f"data.mixture: weight={self.weight:g} of {self.path} must be above 0: leave the source out, or give "
                "it a share"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Location of the text, and its conversion to tokens."""

    path: str = STDLIB
    """A file, folder or glob; `stdlib` = the source of this machine's Python standard library; `hub:NAME` = a hub
    dataset."""
    mixture: tuple[MixtureSource, ...] = ()
    """Several sources in place of `path`: {path, weight} each. Weights are shares of trained tokens, or of pairs."""
    tokenizer: str = "auto"
    """`auto` = tokenizer.json next to the data, else the shipped BPE; `bytes`; `bpe:4096` = train one; or a path."""
    text_field: str = "text"
    """Field of .jsonl and .parquet rows."""
    validation: float = 0.02
    """Share of the text held out for evaluation."""
    limit_bytes: int = 0
    """Read at most this many bytes of text; 0 = all."""
    cache_bytes: int = 16_000_000_000
    """Keep at most this many bytes of shards of a token store behind a URL on local disk, for each source."""
    malformed: Literal["refuse", "skip"] = "refuse"
    """Treatment of rows that cannot be read, such as broken JSON or a missing field: `refuse` names them and stops,
    `skip` leaves them out and counts them."""
    form: Literal["text", "samples"] = TEXT
    """`text`: train on whole texts, in windows; `samples`: rows with messages or prompts, whose answers are trained."""
    template: str = "auto"
    """Fine-tuning: the chat template; `auto` = the one next to the tokenizer, else headings; `chatml`, `llama-3`,
    `llama-2`, `mistral`, `mistral-v1`, `deepseek-v3`; or a Jinja file."""
    train_on: str = "auto"
    """Fine-tuning: `auto` = answers; `last` = the last answer of a conversation; `all`; or roles, such as
    `assistant,tool`."""
    thinking: Literal["keep", "drop"] = "keep"
    """Fine-tuning: `keep` the thoughts before an answer as the template writes them, or `drop` them first."""
    packing: Literal["best-fit", "off"] = "best-fit"
    """Fine-tuning: `best-fit` = several samples share a row without seeing each other; `off` = a row for each
    sample."""
    overlong: Literal["truncate", "drop", "refuse"] = "truncate"
    """Fine-tuning: for a sample longer than recipe.sequence: cut off its end, leave it out, or stop."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise PlanError(f"data.validation={self.validation} is a share: it must lie in [0, 1)")
        if self.mixture:
            self._check_mixture()
        elif not self.path:
            raise PlanError("data.path is empty: give a file, a folder, a glob, or stdlib")
        roles = self.train_on.split(",")
        if self.train_on not in ("auto", "last", "all") and (unknown := [name for name in roles if name not in ROLES]):
            raise PlanError(
                f"data.train_on={printable(self.train_on)}: {unknown[0]!r} is not a role: take auto, last, all, "
                f"or roles among {', '.join(ROLES)}, as assistant,tool"
            )
        if self.limit_bytes < 0:
            raise PlanError(f"data.limit_bytes={self.limit_bytes} must be 0 (all) or more")
        if self.cache_bytes < 1:
            raise PlanError(f"data.cache_bytes={self.cache_bytes} must be 1 or more")
        if self.form == SAMPLES and self.limit_bytes:
            raise PlanError(
                f"data.limit_bytes={self.limit_bytes} cuts text, and data.form=samples reads whole rows: leave it out, "
                "and give a shorter file"
            )
        if self.form == SAMPLES and self.tokenizer.startswith("bpe:"):
            raise PlanError(
                f"data.tokenizer={self.tokenizer} is trained on text, and samples take their model's tokenizer: "
                "leave it out, or give a tokenizer.json"
            )

    def _check_mixture(self) -> None:
        if self.path not in ("", STDLIB):
            raise PlanError(f"data.path={self.path} and data.mixture: give one of them")
        # Where there is a mixture, the default path is no request.
        object.__setattr__(self, "path", "")
        whole = sum(source.weight for source in self.mixture)
        for source in self.mixture:
            share = source.weight / whole
            if share < LEAST_SHARE:
                raise PlanError(
                    f"data.mixture: weight={source.weight:g} of {source.path} is too small: its share is {share:.2g}, "
                    f"and the smallest is 1/{round(1 / LEAST_SHARE):,}. Leave the source out, or raise its weight"
                )

    @property
    def title(self) -> str:
        """Name in reports: the path, or the sources of a mixture as `a.jsonl:0.7,b.jsonl:0.3`."""
        return self.path or ",".join(f"{source.path}:{source.weight:g}" for source in self.mixture)

    @property
    def sources(self) -> "tuple[Data, ...]":
        """The same settings for each source of a mixture by itself."""
        return tuple(
            replace(self, path=source.path, mixture=(), text_field=source.text_field or self.text_field)
            for source in self.mixture
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Second place of a run's checkpoints, behind its folder."""

    url: str = ""
    """An object store that checkpoints are uploaded to while training goes on, as `s3://bucket/runs/a`; empty =
    none."""
    keep_last: int = 2
    """Keep the newest checkpoints there, and the best."""
    bandwidth: float = 0.0
    """Upload at most this many megabytes per second, all ranks together; 0 = no limit."""

    def __post_init__(self) -> None:
        if self.url and not URL.match(self.url):
            raise PlanError(
                f"store.url={printable(self.url)} is no URL: give one as s3://bucket/runs/a. A local folder is "
                "run=runs/a"
            )
        if self.url.startswith("memory:"):
            raise PlanError(f"store.url={printable(self.url)} ends with the process that uploads: give a bucket")
        if self.url.startswith("hf:") and not self.url.startswith("hf://buckets/"):
            raise PlanError(
                f"store.url={printable(self.url)} is a repository of the Hub, which takes 128 commits an hour: give a "
                "bucket, as hf://buckets/NAME/BUCKET/a"
            )
        if self.url.startswith("hf:") and self.bandwidth:
            raise PlanError(
                f"store.bandwidth={self.bandwidth:g}: uploads to the Hub cannot be slowed down: leave it out"
            )
        parts = self.url.rstrip("/").split("/")[2:]
        least = 4 if parts[:1] == ["buckets"] else 2
        if self.url and (len(parts) < least or parts[-1] in ("", "auto", "latest", "..")):
            raise PlanError(
                f"store.url={printable(self.url)} names no run: end it with a name, as in s3://bucket/runs/a"
            )
        if self.keep_last < 1:
            raise PlanError(f"store.keep_last={self.keep_last} must be 1 or more: a run resumes from the newest")
        if not 0 <= self.bandwidth < math.inf:
            raise PlanError(f"store.bandwidth={self.bandwidth:g} must be megabytes per second, or 0 for no limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run: model, data, recipe and layout on a cluster."""

    model: ModelShape
    """The transformer: a preset's name, a Hugging Face folder, or its sizes."""
    data: Data = Data()
    """The text: a path, or a path with more settings."""
    run: str = "runs/auto"
    """The run folder, where everything is written; `auto` as its last part = a new one, `runs/DATE-MODEL`."""
    store: Store = Store()
    """The place of checkpoints in addition to the run folder: a URL, or a URL with more settings."""
    recipe: Recipe = field(default_factory=Recipe)
    """Settings that may change the loss curve."""
    layout: Layout = field(default_factory=Layout)
    """Settings that must not change the loss curve."""
    cluster: Cluster = field(default_factory=Cluster)
    """The hardware: a name such as h100x8, or figures."""
    init: str = RANDOM
    """The initial weights: `random`, or the Hugging Face folder to read them from."""
    teacher: ModelShape | None = None
    """recipe.objective=distill: the model to learn from, given like `model`, or the folder of a run."""
    teacher_init: str = RANDOM
    """Location of the teacher's weights: a Hugging Face folder, or a run; `random` is enough for planning."""

    def __post_init__(self) -> None:
        if not self.run:
            raise PlanError(f"run is empty: give the folder of the run, as {argument('run', 'runs/first')}")
        if URL.match(self.run):
            self._move_run_to_store()
        if not self.init:
            raise PlanError("model.init is empty: give random, or a Hugging Face folder with weights")

    def _move_run_to_store(self) -> None:
        """Read a run behind a URL as its store. Steps are written to local disk first, under the same name."""
        if self.store.url not in ("", self.run):
            raise PlanError(f"run={printable(self.run)} and store.url={printable(self.store.url)}: give one of them")
        url = self.run.rstrip("/")
        object.__setattr__(self, "store", replace(self.store, url=url))
        object.__setattr__(self, "run", f"runs/{url.rpartition('/')[2]}")

    def violations(self) -> list[str]:
        """List why this plan cannot run: each a sentence with rule, clashing numbers and nearest legal change."""
        settings = self.model, self.recipe, self.layout
        violations = [*layout_violations(*settings), *batch_refusals(*settings), *self._noise_scale()]
        if refusal := self.cluster.device.without(self.recipe.precision):
            violations.append(refusal)
        if self.model.lora is not None and self.model.lora.targets == NO_TARGETS:
            violations.append(
                f"model.lora.targets={NO_TARGETS} is for teachers and leaves nothing to train: take "
                "model.lora.targets=all, or leave model.lora out"
            )
        violations += preference_violations(
            self.recipe, form=self.data.form, train_on=self.data.train_on, packing=self.data.packing
        )
        violations += distillation_violations(
            self.recipe, self.model, self.teacher, self.layout, drawn=self.init == RANDOM, mixed=bool(self.data.mixture)
        )
        paths = [source.path for source in self.data.mixture]
        if twice := next((path for path in paths if paths.count(path) > 1), None):
            violations.append(f"data.mixture has {twice} twice: give it once, with the sum of both weights")
        if self.data.form == SAMPLES and self.data.packing != "off" and not self.recipe.document_mask:
            violations.append(
                "recipe.document_mask=false lets the samples of a row see one another: take recipe.document_mask=true, "
                "or data.packing=off"
            )
        if self.data.form == SAMPLES and self.data.packing == "off" and self.model.moe:
            violations.append(
                "data.packing=off pads rows, and a mixture of experts would route the padding: take "
                "data.packing=best-fit"
            )
        if self.store.url and (problem := rollback_problem(self.recipe, self.store.keep_last)):
            violations.append(problem)
        violations += position_refusals(*settings)
        return violations

    @property
    def online_teacher(self) -> ModelShape | None:
        """Teacher that runs in every step of the model. None = none, or one that runs once, before the training."""
        return self.teacher if self.recipe.traits.teacher and not self.recipe.distillation_top_k else None

    @property
    def beyond_positions(self) -> str:
        """Note on a sequence longer than rotary positions are meant for. Empty = it is not."""
        if self.model.positions != "rope" or self.recipe.sequence <= self.model.max_positions:
            return ""
        return (
            f"sequences of {self.recipe.sequence:,} tokens exceed the {self.model.max_positions:,} positions the model "
            "is meant for"
        )

    @property
    def micro_batches(self) -> int:
        """The most forward passes of one rank in a step (gradient accumulation, the batch ramp included)."""
        return max(map(self.layout.micro_batches, self.recipe.global_batches))

    @property
    def recomputed_share(self) -> float:
        """Share of the layers that recompute."""
        sizes = [len(layers) for layers in layers_of_stages(self.model.layers, self.layout)]
        return sum(map(self.layout.recomputed, sizes)) / sum(sizes)

    def copies_state(self, device: str) -> bool:
        """Return whether a run on a kind of device copies its state to host memory to write checkpoints from there."""
        return self.layout.saves_behind(device) and self.recipe.saves_between

    def _noise_scale(self) -> list[str]:
        batches = self.recipe.global_batches
        if not self.recipe.noise_scale_every or any(self.layout.micro_batch_of(batch) < batch for batch in batches):
            return []
        # A batch of one sequence cannot be cut; any other is cut by its largest proper divisor.
        largest = max(batches)
        advice = "recipe.global_batch=2 and layout.micro_batch=1"
        if largest > 1:
            advice = f"layout.micro_batch={divisors(largest)[-2]}"
        return [
            f"recipe.noise_scale_every={self.recipe.noise_scale_every} needs at least two micro-batches a step, and "
            f"recipe.global_batch={largest} is one: take {advice}, or recipe.noise_scale_every=0"
        ]

    @property
    def plan_only(self) -> str:
        """Reason why this plan cannot be trained, without a final period. Empty = it can."""
        device = self.cluster.device.plan_only
        return self.model.plan_only or (self.teacher.plan_only if self.teacher else "") or (
            f"plan only: {device}" if device else "")  # fmt: skip

    def check_runs(self) -> None:
        """Raise PlanError if the engine lacks a part of the model or does not run on the device, else as `check`."""
        if self.plan_only:
            raise PlanError(f"{self.model.name}: {self.plan_only}; `meshwright plan` answers for it")
        self.check()

    def check(self) -> None:
        """Raise IllegalLayout with the first violation and the number of others."""
        violations = self.violations()
        if violations:
            more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
            raise IllegalLayout(violations[0] + more)


def as_document(plan: Plan) -> dict[str, Any]:
    """Return the plan in the form of a plan file, without random origins of weights, a teacher or store it lacks."""
    document = asdict(plan)
    if not plan.store.url:
        document.pop("store")
    if plan.teacher is None:
        document.pop("teacher")
    for section, init in (("model", document.pop("init")), ("teacher", document.pop("teacher_init"))):
        if init != RANDOM and section in document:
            document[section] = {**document[section], "init": init}
    return document


PROPOSED = 2
CHANGED_FIRST = ("dp_shard", "dp_replicate", "pp", "cp", "tp")
FARTHEST = 64
"""Largest distance, up and down, at which other numbers of processes are tried."""


def world_violation(plan: Plan, processes: int, nodes: int = 1) -> str | None:
    """Return why a plan cannot run on this many processes and nodes, or None.

    The reason names the nearest layouts and process counts that can.
    """
    layout, violations = plan.layout, plan.violations()
    if layout.world == processes:
        return _report_violation(plan, violations, processes) if violations else None
    factors = " x ".join(f"{axis}={getattr(layout, axis)}" for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"))
    ranks = many(layout.world, "rank")
    apart = f"the layout has {factors} = {ranks} and {processes} {'was' if processes == 1 else 'were'} started"
    if not violations:
        start = f"start {many(layout.world, 'process', 'processes')} ({_torchrun(plan, nodes)})"
        return f"{apart}: {start}{_suggest_alternative(plan, processes, ', or take ')}"
    # So many processes would not help: the next refusal would be that of the plan.
    instead = _suggest_alternative(plan, processes, ": take ")
    return apart + instead if instead else _report_violation(plan, violations, processes)


def _torchrun(plan: Plan, nodes: int) -> str:
    """Return the torchrun command that starts one process per rank of the layout. It takes the count of one node."""
    world, cluster = plan.layout.world, plan.cluster
    if cluster.devices == world:  # the plan itself says how many nodes its ranks take
        nodes = cluster.nodes
    if nodes == 1:
        return f"torchrun --nproc_per_node {world}"
    if world % nodes:
        return f"torchrun --nproc_per_node, the same on each node: {world} is no multiple of {nodes} nodes"
    return f"torchrun --nnodes {nodes} --nproc_per_node {world // nodes}, on each node"


def _report_violation(plan: Plan, violations: Sequence[str], processes: int) -> str:
    more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
    alternative = (
        _suggest_alternative(plan, processes, f"; legal with {processes} processes: ") if processes > 1 else ""
    )
    return violations[0] + more + alternative


def nearest_layouts(plan: Plan, processes: int) -> list[Layout]:
    """Return the legal layouts for this number of processes, nearest to the plan's degrees first."""
    layouts = []
    for degrees in _products(processes, len(AXES)):
        layout = _adapt_layout(plan, dict(zip(AXES, degrees, strict=True)))
        if not replace(plan, layout=layout).violations():
            layouts.append(layout)
    return sorted(layouts, key=lambda layout: _distance(plan.layout, layout))


def _suggest_alternative(plan: Plan, processes: int, lead: str) -> str:
    """Return `lead` and the nearest legal layouts for this number of processes, such as `layout.dp_shard=2`.

    If none is legal, return a clause that names nearby numbers of processes that work, or an empty string.
    """
    layouts = nearest_layouts(plan, processes)[:PROPOSED]
    if layouts:
        return lead + ", or ".join(differences(plan.layout, layout) for layout in layouts)
    numbers = [
        next(
            (n for n in range(processes + way, processes + way * FARTHEST, way) if n > 0 and nearest_layouts(plan, n)),
            0,
        )
        for way in (-1, 1)
    ]
    legal = " or ".join(str(number) for number in numbers if number)
    started = many(processes, "process", "processes")
    return f"; no layout of {started} is legal for this plan, one of {legal} is" if legal else ""


def differences(old: Layout, new: Layout) -> str:
    """Return the changes from one layout to another, as `key=value` words of the command line."""

    def write(setting: object) -> str:
        return str(list(setting)) if isinstance(setting, tuple) else str(setting).lower()

    return " ".join(f"layout.{name}={write(getattr(new, name))}" for name in _changed_fields(old, new))


def _changed_fields(old: Layout, new: Layout) -> list[str]:
    return [field.name for field in fields(Layout) if getattr(old, field.name) != getattr(new, field.name)]


def _distance(old: Layout, new: Layout) -> tuple[float, int, int]:
    """Return (doublings of degrees, number of changes, cost of communication), to sort by."""
    apart = sum(abs(math.log2(getattr(new, axis) / getattr(old, axis))) for axis in AXES)
    changed = _changed_fields(old, new)
    return round(apart, 6), len(changed), sum(CHANGED_FIRST.index(axis) for axis in changed if axis in AXES)


def _adapt_layout(plan: Plan, degrees: dict[str, int]) -> Layout:
    """Return the layout with these degrees. Settings without meaning under them get their default."""
    changes: dict[str, Any] = dict(degrees)
    # ZeRO, sp and virtual stages are refused without ranks to share with.
    if degrees["dp_shard"] * degrees["cp"] == 1:
        changes["zero"] = 0
    if degrees["tp"] == 1:
        changes["sp"] = False
    if degrees["pp"] == 1:
        changes |= {"vp": 1, "schedule": "1f1b"}
    if degrees["pp"] != plan.layout.pp:
        changes["stages"] = ()
    if plan.model.moe is not None:
        ranks = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
        changes["ep"] = math.gcd(plan.layout.ep, plan.model.moe.experts, ranks)
    return replace(plan.layout, **changes)


def _products(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write a number as an ordered product of `factors` factors."""
    if factors == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in _products(number // first, factors - 1):
            yield (first, *rest)
