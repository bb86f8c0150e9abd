"""Chat formats by name: values of `data.template` besides `auto` and a file."""

from dataclasses import dataclass
from typing import Final

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
