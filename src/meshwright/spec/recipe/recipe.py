"""Recipe: all settings that may change the loss curve, and how often the run evaluates, logs and saves."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, get_args

from meshwright.spec.errors import PlanError
from meshwright.spec.weights.boxes import StateStorage

ObjectiveName = Literal["cross-entropy", "dpo", "ipo", "orpo", "distill"]
CROSS_ENTROPY: ObjectiveName = "cross-entropy"
DISTILL: ObjectiveName = "distill"
FIGURES = ("chosen_reward", "rejected_reward", "reward_margin", "accuracy")
"""Means over pairs: rewards of the better and of the other answer, their difference, and the share of positive
differences."""
TAUGHT = ("divergence", "cross_entropy")
"""Means over tokens: divergence of the student's distribution from the teacher's, times T^2, and cross-entropy of the
text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveTraits:
    """Properties of an objective that other parts of the program depend on."""

    pairs: bool = False
    """It compares two answers to a prompt."""
    reference: bool = False
    """It reads the answers' log-probabilities under the initial weights of the run."""
    teacher: bool = False
    """It reads the distributions of a teacher."""
    smooths: bool = False
    """It supports recipe.preference_smoothing."""
    figures: tuple[str, ...] = ()
    """Names of the figures reported in addition to the loss."""


TRAITS: dict[ObjectiveName, ObjectiveTraits] = {
    "cross-entropy": ObjectiveTraits(),
    "dpo": ObjectiveTraits(pairs=True, reference=True, smooths=True, figures=FIGURES),
    "ipo": ObjectiveTraits(pairs=True, reference=True, figures=FIGURES),
    "orpo": ObjectiveTraits(pairs=True, figures=FIGURES),
    "distill": ObjectiveTraits(teacher=True, figures=TAUGHT),
}
PREFERENCES = tuple(name for name, traits in TRAITS.items() if traits.pairs)
"""Objectives that compare two answers."""


def most_answers(sequence: int) -> int:
    """Return the most answers in a row of `sequence` tokens: pairs of answers, each of two tokens or more."""
    return sequence // 4 * 2


Precision = Literal["fp32", "bf16", "fp16"]
"""Format of weights and of most arithmetic."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
SPIKE_STEPS = 5
"""Steps in a row with a loss far above that of earlier ones that make a spike (recipe.rollback_spikes)."""
NO_SCHEME = "none"
"""Value of recipe.fake_quantize when no weight is rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStage:
    """Stage of a batch ramp: from `tokens` seen on, a step has `global_batch` sequences (as in MiniMax-01)."""

    tokens: int
    """Tokens seen when the stage begins."""
    global_batch: int
    """Sequences of one step in this stage."""

    def __post_init__(self) -> None:
        if self.tokens < 0 or self.global_batch < 1:
            low = (
                f"tokens={self.tokens} is below 0"
                if self.tokens < 0
                else f"global_batch={self.global_batch} is below 1"
            )
            raise PlanError(f"recipe.batch_ramp: {low}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRead:
    """Amount of data that a run had read when it was saved."""

    steps: int = 0
    """Optimizer steps made, of any size."""
    rows: int = 0
    """Sequences read by all ranks together."""
    tokens: int = 0
    """Tokens of these sequences."""


UNREAD = DataRead()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Objective, optimizer, precision and length of the training."""

    steps: int = 500
    """Optimizer steps of the whole run."""
    epochs: float = 0.0
    """Passes over the data, in place of `steps`; 0 = `steps`."""
    tokens: int = 0
    """Tokens to train on, in place of `steps`; 0 = `steps`."""
    sequence: int = 256
    """Tokens of one sequence."""
    global_batch: int = 32
    """Sequences of one optimizer step, over all ranks and micro-batches."""
    batch_ramp: tuple[BatchStage, ...] = ()
    """Other batch sizes later: stages {tokens, global_batch} by tokens seen; before the first, global_batch."""
    seed: int = 0
    """Seed of the initial weights, the data order and dropout."""
    precision: Precision = "fp32"
    """Bytes per parameter: fp32 4+4+8; bf16 2+2, fp32 master 4, moments 4+4; fp16 the same, with loss scaling."""
    products: Literal["same", "fp8", "fp8-all"] = "same"
    """Products of blocks: fp8 rounds the bf16 operands of linear products to e4m3, row by row, except in gradients of
    weights; fp8-all: these too, and the products of experts."""
    tf32: bool = False
    """fp32 on a GPU: products round their operands to TF32 (10 bits of mantissa), 8 times as fast on an H100."""
    deterministic: bool = False
    """On a GPU: the same bits from the same plan, by slower kernels; an operation without such a kernel is refused."""
    reduce_dtype: Literal["fp32", "model"] = "fp32"
    """Dtype in which gradients are summed over micro-batches and ranks; model = that of the weights (small addends get
    lost in bf16 sums)."""

    learning_rate: float = 3e-4
    """The largest rate, reached after warmup_steps."""
    min_learning_rate_ratio: float = 0.1
    """The last rate / learning_rate: 0.1 ends at a tenth."""
    learning_rate_schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Decay of the rate after warm-up; wsd: warm-up, stable, then decay over the last decay_steps."""
    warmup_steps: int = -1
    """Steps over which the rate rises from 0; -1 = a hundredth of them within 20 and 2,000, at most a tenth."""
    decay_steps: int = 0
    """Steps of the final decay of wsd; 0 = a fifth of the steps."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: matrices of attention, MLP and experts step by their orthogonalized momentum (arXiv:2502.16982), scaled to
    fit AdamW's learning rate; embeddings, head, routers, norms and biases use AdamW."""
    momentum: float = 0.95
    """muon: decay of the mean of a matrix's gradient, with Nesterov's look-ahead."""
    beta1: float = 0.9
    """AdamW: decay of the mean of the gradient."""
    beta2: float = 0.95
    """AdamW: decay of the mean of its square."""
    epsilon: float = 1e-8
    """AdamW: added to the root of that mean. muon: the least norm that a matrix is divided by."""
    optimizer_states: Literal["fp32", "bf16", "int8"] = "fp32"
    """Storage of moments, muon's too: bf16, rounded stochastically; int8, in blocks with an fp32 scale each
    (arXiv:2110.02861)."""
    master_weights: Literal["fp32", "none"] = "fp32"
    """bf16 only: none = no fp32 copy; weights are updated in bf16 and rounded stochastically."""
    weight_decay: float = 0.1
    """Decay of matrices; norms, biases and other vectors never decay."""
    clip: float = 1.0
    """Largest gradient norm; 0 = no clipping."""
    skip_nonfinite: int = 0
    """Most steps in a row that are skipped because loss or gradient is not finite; one more ends the run."""
    skip_spikes: float = 0.0
    """Skip a step whose gradient norm exceeds this multiple of its mean over about 50 steps, after warm-up; 0 =
    none."""
    rollback_spikes: int = 0
    """Most times that a run goes back to the checkpoint before a spike of the loss and skips the data read since
    (arXiv:2204.02311, section 5.1); 0 = never."""
    dropout: float = 0.0
    """Share of activations set to 0 while training."""
    balance_loss: float = 0.001
    """Weight of the load-balance loss of a mixture of experts (Fedus et al. 2021, eq. 4)."""
    document_mask: bool = True
    """Packed documents do not attend across their borders."""
    objective: ObjectiveName = CROSS_ENTROPY
    """cross-entropy; or over pairs of a better and a worse answer: dpo (arXiv:2305.18290), ipo (arXiv:2310.12036),
    orpo (arXiv:2403.07691); distill: the distributions of `teacher` (arXiv:1503.02531)."""
    preference_beta: float = 0.1
    """dpo, ipo: how strongly answers are held to the initial weights; orpo: weight of the odds ratio."""
    preference_smoothing: float = 0.0
    """dpo: assumed share of pairs whose preference is reversed (label smoothing)."""

    distillation_beta: float = 0.0
    """distill: 0 = forward KL, 1 = reverse KL, between: generalized Jensen-Shannon divergence (arXiv:2306.13649)."""
    distillation_temperature: float = 1.0
    """distill: temperature that divides the logits of teacher and student; the loss is multiplied by its square."""
    distillation_hard: float = 0.0
    """distill: weight of the cross-entropy of the text itself; the divergence has 1 minus this weight."""
    distillation_top_k: int = 0
    """distill: 0 = the teacher runs along with the student; else it runs once beforehand, and this many of its
    likeliest successors of each token are stored on disk, with the total probability of all others."""
    distillation_on_policy: float = 0.0
    """distill: share of steps in which the student writes the answers that the teacher scores (GKD's lambda)."""
    distillation_sampling: float = 1.0
    """distill: temperature at which the student samples them; 0 = always the likeliest token."""

    fake_quantize: str = NO_SCHEME
    """Round weights in every product like a scheme of `quantize`, such as int4-rtn, and train them for it; codes
    written afterwards are those of training."""

    noise_scale_every: int = 0
    """Steps between measurements of the gradient noise scale (McCandlish et al. 2018); 0 = never."""
    eval_every: int = 100
    """Steps between evaluations; 0 = only at the end."""
    eval_sequences: int = 64
    """Held-out sequences per evaluation; 0 = all."""
    checkpoint_every: int = 100
    """Steps between checkpoints; 0 = only at the end."""
    keep_last: int = 2
    """Checkpoints to keep, besides the best one."""
    log_every: int = 1
    """Steps between lines of the log; metrics.jsonl has every step."""
    sample_every: int = 0
    """Steps between sample answers of the model, saved in samples.jsonl; 0 = none."""
    sample_prompts: tuple[str, ...] = ()
    """Prompts of these samples; empty = the beginnings of three held-out documents or conversations."""
    sample_tokens: int = 64
    """Most new tokens of a sample."""

    def __post_init__(self) -> None:
        positive = ("steps", "sequence", "global_batch", "keep_last", "log_every")
        every = ("noise_scale_every", "eval_every", "eval_sequences", "checkpoint_every", "sample_every")
        for field in positive:
            if not 1 <= getattr(self, field) < 2**31:
                raise PlanError(f"recipe.{field}={getattr(self, field)} must be at least 1 and below 2**31")
        if self.warmup_steps < -1:
            raise PlanError(f"recipe.warmup_steps={self.warmup_steps} must be 0 or more, or -1")
        for field in ("decay_steps", "skip_nonfinite", "rollback_spikes", *every):
            if getattr(self, field) < 0:
                raise PlanError(f"recipe.{field}={getattr(self, field)} must be 0 or more")
        if self.seed < 0 or self.seed >= 2**63:
            raise PlanError(f"recipe.seed={self.seed} must lie between 0 and 2**63 - 1")
        for field in ("learning_rate", "min_learning_rate_ratio", "weight_decay", "clip", "balance_loss"):
            if not 0 <= getattr(self, field) < math.inf:
                raise PlanError(f"recipe.{field}={getattr(self, field)} must be a finite number of 0 or more")
        if self.skip_spikes and not 1 < self.skip_spikes < math.inf:
            raise PlanError(
                f"recipe.skip_spikes={self.skip_spikes} must be above 1 (times the mean norm), or 0 for none"
            )
        if not 0 <= self.epochs < math.inf:
            raise PlanError(f"recipe.epochs={self.epochs} must be a number of 0 (recipe.steps) or more")
        if not 0 <= self.tokens < 2**63:
            raise PlanError(f"recipe.tokens={self.tokens} must be a number of 0 (recipe.steps) or more")
        if self.epochs and self.tokens:
            raise PlanError(f"recipe.epochs={self.epochs:g} and recipe.tokens={self.tokens}: give one of them")
        if not self.epsilon > 0 or not math.isfinite(self.epsilon):
            raise PlanError(f"recipe.epsilon={self.epsilon} must be above 0")
        for field in ("momentum", "beta1", "beta2", "dropout"):
            if not 0 <= getattr(self, field) < 1:
                raise PlanError(f"recipe.{field}={getattr(self, field)} must lie in [0, 1)")
        if not 0 < self.preference_beta < math.inf:
            raise PlanError(f"recipe.preference_beta={self.preference_beta} must be a finite number above 0")
        if not 0 <= self.preference_smoothing < 0.5:
            raise PlanError(
                f"recipe.preference_smoothing={self.preference_smoothing} is a share of pairs: it must lie in [0, 0.5)"
            )
        if problem := distillation_problem(self) or rollback_problem(self):
            raise PlanError(problem)
        if self.min_learning_rate_ratio > 1:
            raise PlanError(
                f"recipe.min_learning_rate_ratio={self.min_learning_rate_ratio} is a share of learning_rate: "
                "at most 1 (0.1 = a tenth)"
            )
        if self.sample_every and not 1 <= self.sample_tokens < self.sequence:
            raise PlanError(
                f"recipe.sample_tokens={self.sample_tokens} must be at least 1 and below "
                f"recipe.sequence={self.sequence}, to leave room for a prompt"
            )
        if self.epochs and self.batch_ramp:
            raise PlanError(
                "recipe.epochs with recipe.batch_ramp: give recipe.steps, for steps read more and more rows"
            )
        if self.warmup_steps > self.steps and not self.epochs and not self.tokens:
            raise PlanError(
                f"recipe.warmup_steps={self.warmup_steps} exceeds recipe.steps={self.steps}: "
                f"take recipe.warmup_steps={self.steps // 10}"
            )
        tokens = [stage.tokens for stage in self.batch_ramp]
        if tokens != sorted(set(tokens)):
            raise PlanError(f"recipe.batch_ramp: tokens must rise from stage to stage, not {tokens}")

    @property
    def traits(self) -> ObjectiveTraits:
        """Properties of the objective."""
        return TRAITS[self.objective]

    @property
    def rising_steps(self) -> int:
        """Steps over which the rate rises. Llama 2 (arXiv:2307.09288) and OLMo 2 (arXiv:2501.00656) took 2,000."""
        if self.warmup_steps >= 0:
            return self.warmup_steps
        return min(self.steps // 10, max(20, min(2000, self.steps // 100)))

    @property
    def storage(self) -> StateStorage:
        """Storage of optimizer states."""
        return StateStorage(self.optimizer_states, self.master_weights == "fp32", self.optimizer)

    def over(self, rows: int = 0, read: DataRead | None = UNREAD) -> "Recipe":
        """Return the recipe with the steps that `tokens` mean, or `epochs` of `rows` rows, or itself if it has neither.

        Data `read` earlier counts as read, and only the rest counts in steps of this recipe. None = not known yet, and
        a warm-up longer than the run is then no error. Raises PlanError for one otherwise.
        """
        if not self.epochs and not self.tokens:
            return self
        is_known, read = read is not None, read or UNREAD
        if self.tokens:
            more = self._steps_between(read.tokens, self.tokens)
        else:  # epochs as they were written: 1.1 of 10 rows are 11, and in binary a little more
            more = math.ceil((Fraction(str(self.epochs)) * rows - read.rows) / self.global_batch)
        steps = max(1, read.steps + max(0, more))
        if self.warmup_steps > steps and is_known:
            length = f"recipe.tokens={self.tokens}" if self.tokens else f"recipe.epochs={self.epochs:g}"
            raise PlanError(
                f"recipe.warmup_steps={self.warmup_steps} exceeds the {steps} steps of {length}: "
                f"take recipe.warmup_steps={steps // 10}"
            )
        return replace(self, steps=steps)

    def _steps_between(self, seen: int, tokens: int) -> int:
        """Return the number of steps from `seen` tokens until at least `tokens` are read."""
        steps = 0
        # Between two borders of the ramp, every step reads equally many tokens.
        for border in (*(stage.tokens for stage in self.batch_ramp if stage.tokens < tokens), tokens):
            step_tokens = self.global_batch_at(seen) * self.sequence
            more = max(0, -(-(border - seen) // step_tokens))
            steps, seen = steps + more, seen + more * step_tokens
        return steps

    def tokens_of_run(self, read: DataRead = UNREAD) -> int:
        """Return the number of tokens read after the last step, the batch ramp included."""
        done, seen = read.steps, read.tokens
        while done < self.steps:
            step_tokens = self.global_batch_at(seen) * self.sequence
            following = next((stage.tokens for stage in self.batch_ramp if stage.tokens > seen), math.inf)
            steps = math.ceil((following - seen) / step_tokens) if following < math.inf else self.steps
            steps = min(self.steps - done, steps)
            done, seen = done + steps, seen + steps * step_tokens
        return seen

    @property
    def global_batches(self) -> tuple[int, ...]:
        """Sequences of one step, before the batch ramp and in each of its stages."""
        return (self.global_batch, *(stage.global_batch for stage in self.batch_ramp))

    @property
    def largest(self) -> "Recipe":
        """The same recipe with all steps as large as the largest of the batch ramp, which needs the most memory."""
        return replace(self, global_batch=max(self.global_batches), batch_ramp=()) if self.batch_ramp else self

    @property
    def saves_between(self) -> bool:
        """Training continues after some checkpoint. If the data decides the number of steps, this is assumed."""
        return self.checkpoint_every > 0 and (self.epochs > 0 or self.checkpoint_every < self.steps)

    def global_batch_at(self, tokens_seen: int) -> int:
        """Return the number of sequences in the step that starts after `tokens_seen` tokens."""
        batch = self.global_batch
        for stage in self.batch_ramp:
            if tokens_seen >= stage.tokens:
                batch = stage.global_batch
        return batch


def rollback_problem(recipe: Recipe, stored: int = 0) -> str:
    """Return what keeps a run from going back before a spike. Empty = nothing, or nobody asks for it.

    `stored`: checkpoints that a store keeps, to be judged instead of those on disk.
    """
    asked = f"recipe.rollback_spikes={recipe.rollback_spikes}"
    longest_row = max(SPIKE_STEPS, recipe.skip_nonfinite + 1)
    if not recipe.rollback_spikes:
        return ""
    if recipe.epochs:
        return f"{asked} skips rows, which recipe.epochs={recipe.epochs:g} counts: give recipe.steps or recipe.tokens"
    if recipe.distillation_top_k:
        return (
            f"{asked} reads rows beyond those that recipe.distillation_top_k={recipe.distillation_top_k} stores: take "
            "recipe.distillation_top_k=0, or recipe.rollback_spikes=0"
        )
    # When a spike is noticed, the oldest of the kept checkpoints must be one from before its first step.
    keep_last, key = stored or recipe.keep_last, "store.keep_last" if stored else "recipe.keep_last"
    if recipe.checkpoint_every * (keep_last - 1) < longest_row:
        return (
            f"{asked} needs a checkpoint from {longest_row} steps ago, with recipe.checkpoint_every="
            f"{recipe.checkpoint_every} and {key}={keep_last}: take recipe.checkpoint_every="
            f"{max(longest_row, recipe.checkpoint_every)} {key}={max(2, keep_last)}"
        )
    return ""


def distillation_problem(recipe: Recipe) -> str:
    """Return what is wrong with the numbers of distillation. Empty = nothing."""
    beta, heat, hard = recipe.distillation_beta, recipe.distillation_temperature, recipe.distillation_hard
    if not 0 <= beta <= 1:
        return f"recipe.distillation_beta={beta} must lie in [0, 1]: 0 = forward KL, 1 = reverse KL"
    if not 0 < heat < math.inf:
        return f"recipe.distillation_temperature={heat} must be a finite number above 0"
    if not 0 <= hard < 1:
        return (
            f"recipe.distillation_hard={hard} is the weight of cross-entropy: it must lie in [0, 1) "
            f"(1 = recipe.objective={CROSS_ENTROPY})"
        )
    if not 0 <= recipe.distillation_top_k < 2**15:
        return f"recipe.distillation_top_k={recipe.distillation_top_k} must be 0 (online) or more, and below 2**15"
    if not 0 <= recipe.distillation_on_policy <= 1:
        return f"recipe.distillation_on_policy={recipe.distillation_on_policy} is a share of steps: take 0 to 1"
    if not 0 <= recipe.distillation_sampling < math.inf:
        return f"recipe.distillation_sampling={recipe.distillation_sampling} must be a finite number of 0 or more"
    return ""
