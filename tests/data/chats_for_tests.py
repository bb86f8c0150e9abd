"""Chat templates in the forms of well-known models, tokenizers for them, and random conversations."""

import re
from functools import cache
from typing import Any

import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from tests.data.tokenizers_for_tests import made, metaspace, with_added

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- else %}{{- 'You are helpful.' }}{%- endif %}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content + '\\n\\n' %}{%- set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}{%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate: user, assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}
    {%- else %}
        {%- generation %}{{- ' ' + message.content + eos_token }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}\
{% endif %}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}\
{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' }}{% if role == 'model' %}\
{% generation %}{{ message['content'] | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\\n' }}{% else %}\
{{ message['content'] | trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

QWEN3 = """{%- set last = namespace(user=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if loop.index0 > last.user %}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

DEEPSEEK = """{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}\
{{ '<|User|>' + message.content }}{% elif message.role == 'system' %}{{ message.content }}{% else %}\
{% set content = message.content.split('</think>')[-1] %}{{ '<|Assistant|>' }}{% generation %}\
{{ content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "deepseek": DEEPSEEK}
"""Those that show a turn in one form."""

SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|User|>", "<|Assistant|>",
)  # fmt: skip
SPELLED = {"bos_token": "<s>", "eos_token": "</s>"}
BYTE_LEVEL = ("gpt2", "llama3", "qwen2")
SPACED = ("metaspace", "sentencepiece")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'What it\'s like \u2014 in a "city" <b>',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def unmarked(template: str) -> str:
    """The same without `{% generation %}`."""
    return re.sub(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}", _blank, template)


def _blank(tag: re.Match[str]) -> str:
    """A comment trims the blanks around it as the tag does."""
    return f"{{#{tag[1]} {tag[2]}#}}"


@cache
def tokenizer_json(name: str) -> str:
    """One with all tokens of SPECIAL."""
    text = {"metaspace": metaspace, "sentencepiece": _sentencepiece}.get(name, lambda: made(name))()
    for token in SPECIAL:
        text = with_added(text, token, special=True)
    return text


def _sentencepiece() -> str:
    """In the manner of Mistral: a space before the first word only; bytes for what is unknown."""
    library = tokenizers.Tokenizer.from_str(metaspace())
    vocab = library.get_vocab(with_added_tokens=False)
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return str(made.to_str())


WORDS = [
    "", " ", "\n", "\n\n", "  two", "a", "Hello", " the caller's", "na\u00efve", "\u65e5\u672c\u8a9e", "\U0001f600",
    "\U0001f469\u200d\U0001f680", "e\u0301", "\ufdd0", "\ufdd1", "\ufffd", "x = {'a': 1}", "{{ 7 * 7 }}", "{% raw %}",
    "<b>", "&amp;", "\\n", "\t", "\r\n", "1234567", "\u0663", "user", "assistant", "\u2028", "\x00",
]  # fmt: skip
CONTENT = st.one_of(st.lists(st.sampled_from(WORDS), max_size=5).map("".join), st.text(max_size=12))


@st.composite
def conversations(draw: Any, *, system: bool = True, answered: bool = False) -> list[dict[str, Any]]:
    """Turns of a user and an assistant, perhaps after a system's; `answered` = the last is an answer."""
    turns = draw(st.integers(1, 3)) * 2 - (0 if answered else draw(st.integers(0, 1)))
    messages = [{"role": ("user", "assistant")[turn % 2], "content": draw(CONTENT)} for turn in range(turns)]
    first = [{"role": "system", "content": draw(CONTENT)}] if system and draw(st.booleans()) else []
    return first + messages
