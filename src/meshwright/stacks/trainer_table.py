"""Every training software that `--for` and `--from` know, by its word."""

from meshwright.spec.errors import PlanError, argument
from meshwright.spec.presets import suggest
from meshwright.stacks.declaration.software import TrainingSoftware
from meshwright.stacks.trainers.accelerate_fsdp import ACCELERATE_FSDP
from meshwright.stacks.trainers.axolotl import AXOLOTL
from meshwright.stacks.trainers.deepspeed import DEEPSPEED
from meshwright.stacks.trainers.hai_llm import HAI_LLM
from meshwright.stacks.trainers.litgpt import LITGPT
from meshwright.stacks.trainers.llm_foundry import LLM_FOUNDRY
from meshwright.stacks.trainers.maxtext import MAXTEXT
from meshwright.stacks.trainers.megatron_lm import MEGATRON_LM
from meshwright.stacks.trainers.nanotron import NANOTRON
from meshwright.stacks.trainers.nemo import NEMO
from meshwright.stacks.trainers.torchtitan import TORCHTITAN
from meshwright.stacks.trainers.torchtune import TORCHTUNE
from meshwright.stacks.trainers.trl_sft import TRL_SFT

SOFTWARE = {stack.word: stack for stack in (
    TORCHTITAN, MEGATRON_LM, ACCELERATE_FSDP, DEEPSPEED, TRL_SFT, AXOLOTL, NANOTRON, NEMO, MAXTEXT,
)}  # fmt: skip
PLANNED = {**SOFTWARE, HAI_LLM.word: HAI_LLM}
"""Software that layouts are searched for: those above write files too."""
READ = {**SOFTWARE, **{stack.word: stack for stack in (TORCHTUNE, LITGPT, LLM_FOUNDRY)}}
"""Software whose files are read."""


def software(word: str) -> TrainingSoftware:
    """Return the software for a word. Raises PlanError with the nearest words."""
    if word not in PLANNED:
        raise PlanError(f"{argument('stack', word)} is not known; {suggest(word, PLANNED)}")  # fmt: skip
    return PLANNED[word]
