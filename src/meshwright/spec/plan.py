"""Plan: the four nouns together with the data and the run folder. It is what is run."""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from meshwright.spec.cluster import Cluster
from meshwright.spec.distillation_rules import distillation_violations
from meshwright.spec.errors import IllegalLayout, PlanError, printable
from meshwright.spec.layout import Layout
from meshwright.spec.legal import batch_refusals, divisors, layout_violations, position_refusals
from meshwright.spec.lora import NONE as NO_TARGETS
from meshwright.spec.places import layers_of_stages
from meshwright.spec.preference_rules import preference_violations
from meshwright.spec.recipe import Recipe
from meshwright.spec.shape import ModelShape

ROLES = ("system", "user", "assistant", "tool")
"""Who speaks in a conversation."""
RANDOM = "random"
"""`Plan.init` of a run whose weights are drawn."""


STDLIB = "stdlib"
"""`Data.path` of the Python standard library's source."""
TEXT: Final = "text"
SAMPLES: Final = "samples"
"""`Data.form`."""
LEAST_SHARE = 1 / 2**16
"""Of a mixture: shares are kept to this fraction (data/interleaving.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSource:
    """One of several sources that are trained on together."""

    path: str
    """As data.path."""
    weight: float
    """Its share of the trained tokens, or of the pairs, beside the weights of the others: 7 and 3 are 70 % and 30 %."""
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
    """Where the text is and how it becomes tokens."""

    path: str = STDLIB
    """A file, folder or glob; `stdlib` = the Python standard library's source here; `hub:NAME` = a hub dataset."""
    mixture: tuple[MixtureSource, ...] = ()
    """Several sources in place of `path`: {path, weight} each. Weights are shares of trained tokens, or of pairs."""
    tokenizer: str = "auto"
    """`auto` = tokenizer.json beside the data, else the shipped BPE; `bytes`; `bpe:4096` = train one; or a path."""
    text_field: str = "text"
    """Field of .jsonl and .parquet rows."""
    validation: float = 0.02
    """Share of the text held out for evaluation."""
    limit_bytes: int = 0
    """Read at most so much text; 0 = all."""
    malformed: Literal["refuse", "skip"] = "refuse"
    """Of rows that cannot be read, as broken JSON or a missing field: `refuse` names them and stops, `skip` leaves them
    out and counts them."""
    form: Literal["text", "samples"] = TEXT
    """`text`: trained on whole, in windows; `samples`: rows with messages or prompts, of which answers are trained."""
    template: str = "auto"
    """Fine-tuning: the chat template; `auto` = the one beside the tokenizer, else headings; `chatml`, `llama-3`,
    `llama-2`, `mistral`, `mistral-v1`, `deepseek-v3`; or a Jinja file."""
    train_on: str = "auto"
    """Fine-tuning: `auto` = answers; `last` = the last of a conversation; `all`; or roles, as `assistant,tool`."""
    thinking: Literal["keep", "drop"] = "keep"
    """Fine-tuning: `keep` what answers think before they speak as the template has it, or `drop` it before."""
    packing: Literal["best-fit", "off"] = "best-fit"
    """Fine-tuning: several samples share a row and do not see one another; `off` = a row for each sample."""
    overlong: Literal["truncate", "drop", "refuse"] = "truncate"
    """Fine-tuning: of a sample longer than recipe.sequence: cut its end off, leave it out, or stop."""

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
        """A mixture stands in place of the path."""
        if self.path not in ("", STDLIB):
            raise PlanError(f"data.path={self.path} and data.mixture: give one of them")
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
        """What people call it: the path, or the sources of a mixture as `a.jsonl:0.7,b.jsonl:0.3`."""
        return self.path or ",".join(f"{source.path}:{source.weight:g}" for source in self.mixture)

    @property
    def sources(self) -> "tuple[Data, ...]":
        """The same settings for each source of a mixture by itself."""
        return tuple(
            replace(self, path=one.path, mixture=(), text_field=one.text_field or self.text_field)
            for one in self.mixture
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run: what is trained on what, how, and laid out where."""

    model: ModelShape
    """The transformer: a preset's name, a Hugging Face folder, or its sizes."""
    data: Data = Data()
    """The text: a path, or a path with more settings."""
    run: str = "runs/auto"
    """The run folder, where everything is written; `auto` as its last part = a new one, `runs/DATE-MODEL`."""
    recipe: Recipe = field(default_factory=Recipe)
    """What may change the loss curve."""
    layout: Layout = field(default_factory=Layout)
    """What must not change the loss curve."""
    cluster: Cluster = field(default_factory=Cluster)
    """What it runs on: a name as h100x8, or figures."""
    init: str = RANDOM
    """The first weights: `random`, or the Hugging Face folder that they are read from."""
    teacher: ModelShape | None = None
    """recipe.objective=distill: the model that is learnt from, as `model` is given; or the folder of a run."""
    teacher_init: str = RANDOM
    """Where the teacher's weights are: a Hugging Face folder, or a run; `random` serves to plan with."""

    def __post_init__(self) -> None:
        if not self.run:
            raise PlanError("run is empty: give the folder of the run, as run=runs/first")
        if not self.init:
            raise PlanError("model.init is empty: give random, or a Hugging Face folder with weights")

    def violations(self) -> list[str]:
        """Why this plan cannot run: each a sentence with rule, clashing numbers and nearest legal change."""
        given = self.model, self.recipe, self.layout
        found = [*layout_violations(*given), *batch_refusals(*given), *self._noise_scale()]
        found += [no] if (no := self.cluster.device.without(self.recipe.precision)) else []
        if self.model.lora is not None and self.model.lora.targets == NO_TARGETS:
            found.append(
                f"model.lora.targets={NO_TARGETS} is for teachers, and leaves nothing to train: take "
                "model.lora.targets=all, or leave model.lora out"
            )
        found += preference_violations(
            self.recipe, form=self.data.form, train_on=self.data.train_on, packing=self.data.packing
        )
        found += distillation_violations(
            self.recipe, self.model, self.teacher, self.layout, drawn=self.init == RANDOM, mixed=bool(self.data.mixture)
        )
        paths = [source.path for source in self.data.mixture]
        if twice := next((path for path in paths if paths.count(path) > 1), None):
            found.append(f"data.mixture has {twice} twice: give it once, with the sum of both weights")
        if self.data.form == SAMPLES and self.data.packing != "off" and not self.recipe.document_mask:
            found.append(
                "recipe.document_mask=false lets the samples of a row see one another: take recipe.document_mask=true, "
                "or data.packing=off"
            )
        if self.data.form == SAMPLES and self.data.packing == "off" and self.model.moe:
            found.append(
                "data.packing=off fills rows up, and a mixture of experts would route what fills them: take "
                "data.packing=best-fit"
            )
        found += position_refusals(*given)
        return found

    @property
    def beside(self) -> ModelShape | None:
        """A teacher that stands beside the model in every step; None where there is none, or where it is asked once,
        before the run."""
        return self.teacher if self.recipe.traits.teacher and not self.recipe.distillation_top_k else None

    @property
    def beyond_positions(self) -> str:
        """Said of a sequence that is longer than rotary positions are meant for; empty where it is not."""
        if self.model.positions != "rope" or self.recipe.sequence <= self.model.max_positions:
            return ""
        return (
            f"sequences of {self.recipe.sequence:,} tokens exceed the {self.model.max_positions:,} positions the model "
            "is meant for"
        )

    @property
    def micro_batches(self) -> int:
        """The most forward passes that one rank makes in a step (gradient accumulation, the batch ramp included)."""
        return max(map(self.layout.micro_batches, self.recipe.global_batches))

    @property
    def recomputed_share(self) -> float:
        """Of the layers, those that recompute."""
        sizes = [len(layers) for layers in layers_of_stages(self.model.layers, self.layout)]
        return sum(map(self.layout.recomputed, sizes)) / sum(sizes)

    def copies_state(self, device: str) -> bool:
        """Whether a program on a kind of device (cpu, cuda) keeps a copy of the state in host memory, from which a
        thread writes checkpoints."""
        return self.layout.saves_behind(device) and self.recipe.saves_between

    def _noise_scale(self) -> list[str]:
        """It compares micro-batches with their step; a ramp may begin with steps of one."""
        batches = self.recipe.global_batches
        if not self.recipe.noise_scale_every or any(self.layout.micro_batch_of(batch) < batch for batch in batches):
            return []
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
        """Why no run can be made of it, as a sentence without its end; empty where one can."""
        device = self.cluster.device.plan_only
        return self.model.plan_only or (self.teacher.plan_only if self.teacher else "") or (
            f"plan only: {device}" if device else "")  # fmt: skip

    def check_runs(self) -> None:
        """As `check`; PlanError too where the engine lacks a part of the model, or does not run on the device."""
        if self.plan_only:
            raise PlanError(f"{self.model.name}: {self.plan_only}; `meshwright plan` answers for it")
        self.check()

    def check(self) -> None:
        """Raise the first violation (and say how many more there are)."""
        found = self.violations()
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise IllegalLayout(found[0] + more)


def as_document(plan: Plan) -> dict[str, Any]:
    """The plan as a plan file has it: where weights are from belongs to their model, and is left out where they are
    drawn; so is a teacher that is not there."""
    found = asdict(plan)
    if plan.teacher is None:
        found.pop("teacher")
    for section, init in (("model", found.pop("init")), ("teacher", found.pop("teacher_init"))):
        if init != RANDOM and section in found:
            found[section] = {**found[section], "init": init}
    return found
