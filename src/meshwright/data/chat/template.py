"""Chat templates: a model's own Jinja template, run in a sandbox, with the spans that it marks as generated.

Names and filters are those that templates of Hugging Face models expect (transformers, `utils/chat_template_utils.py`).
Templates come with models from anywhere. They see no attribute of Python's own and no file, and their loops end. A
separate process also bounds time and memory while data is encoded (data/corpus/worker.py).
"""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from functools import cached_property
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from meshwright.spec.errors import DataError, MalformedRowError

_BEGIN, _END = (f"\ufdd0{secrets.randbits(64)}{side}\ufdd0" for side in "<>")
"""Marks around generated text until it is extracted. No row can spell them."""

_MOST_CHARACTERS: Final = 2**24
"""Limit for a rendered conversation, and for each sum or product of texts."""
_MOST_ROUNDS: Final = 2**18
"""Limit for all loops and macros of a rendered conversation: some seconds."""
_MOST_BITS: Final = 2**12
"""Limit for a product or power of whole numbers. Repeated multiplication would exhaust the memory."""

Span = tuple[int, int]
"""Characters [begin, end)."""


class _Generation(Extension):
    """Tag `{% generation %} ... {% endgeneration %}` around what the model says."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.CallBlock:
        """Return the block, whose text goes through `mark`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("mark"), [], [], body)
        block.set_lineno(line)
        return block

    def mark(self, caller: Any) -> str:
        """Return the text between marks, which `render` removes again."""
        return f"{_BEGIN}{caller()}{_END}"


class _Limits(Extension):
    """Limits of a rendering: rounds of loops, and the length of what `~` joins."""

    rounds_left = 0

    def limited(self, template: nodes.Template) -> nodes.Template:
        """Return the template with loops and macros that count each round."""
        repeated: list[nodes.For | nodes.Macro | nodes.CallBlock] = [*template.find_all(nodes.For)]
        repeated += [*template.find_all(nodes.Macro), *template.find_all(nodes.CallBlock)]
        for part in repeated:
            part.body.insert(0, nodes.ExprStmt(self.call_method("count"), lineno=part.lineno))
        limited_template: nodes.Template = _Joins(self).visit(template)
        return limited_template

    def count(self) -> None:
        """Count one round."""
        self.rounds_left -= 1
        if self.rounds_left < 0:
            raise jinja2.TemplateError(f"it runs more than {_MOST_ROUNDS:,} rounds of loops for one conversation")

    def joined(self, parts: Sequence[Any]) -> str:
        """Join the operands of `~`."""
        return _join_bounded(map(str, parts))


class _Joins(NodeTransformer):
    """Transformer that hands `~` to `_Limits`."""

    def __init__(self, limits: _Limits) -> None:
        self._limits = limits

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Replace `a ~ b ~ c`."""
        self.generic_visit(node)
        return self._limits.call_method("joined", [nodes.List(node.nodes)], lineno=node.lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Sandbox whose `+`, `*` and `%` cannot make a text or list that is too long."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator. Raises TemplateError when its result would be too long."""
        sizes = [len(operand) for operand in (left, right) if isinstance(operand, str | list | tuple)]
        long = operator == "+" and sum(sizes) > _MOST_CHARACTERS
        times = next((operand for operand in (left, right) if isinstance(operand, int)), 1) if operator == "*" else 1
        widths = map(int, re.findall(r"\d+", left)) if operator == "%" and isinstance(left, str) else ()
        digits = [operand.bit_length() for operand in (left, right) if isinstance(operand, int)]
        bits = {"*": sum(digits), "**": digits[0] * abs(right)}.get(operator, 0) if len(digits) == 2 else 0
        long |= sum(sizes) * times > _MOST_CHARACTERS or max(widths, default=0) > _MOST_CHARACTERS
        if long or bits > _MOST_BITS:
            raise jinja2.TemplateError(f"{operator} makes more than {_MOST_CHARACTERS:,} characters")
        return super().call_binop(context, operator, left, right)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text, and the spans that the template marks as generated."""

    text: str
    generated: tuple[Span, ...]


@dataclass(frozen=True)
class ChatTemplate:
    """One template and the spelling of the special tokens that it may name (`bos_token` and the like)."""

    source: str
    special: Mapping[str, str]
    today: date
    """Date that `strftime_now` formats."""
    name: str = "the chat template"
    """Name in messages."""
    tool_source: str = ""
    """Source of the template for conversations with tools. Empty = there is no other."""

    @cached_property
    def with_tools(self) -> "ChatTemplate":
        """Template for conversations with tools, chosen as in transformers."""
        return replace(self, source=self.tool_source, tool_source="") if self.tool_source else self

    @property
    def marks(self) -> bool:
        """The template itself marks what is generated."""
        return "generation" in self.source and "endgeneration" in self.source

    @cached_property
    def takes_tools(self) -> bool:
        """The template reads its tools and does not refuse them. Raises DataError for an invalid template."""
        if self.tool_source:
            return self.with_tools.takes_tools
        uses = sum(name.name == "tools" for name in self._tree.find_all(nodes.Name))
        return "tools" in meta.find_undeclared_variables(self._tree) and uses > sum(
            map(_refuses_tools, self._tree.find_all(nodes.If))
        )

    @cached_property
    def _takes_parts(self) -> bool:
        """The template iterates over the parts of a content, as templates of models with images do."""
        iterated = (loop.iter for loop in self._tree.find_all(nodes.For))
        return any("content" in map(_last_name, (part, *part.find_all(nodes.Node))) for part in iterated)

    def joined(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message whose content is one text.

        Parts are joined by line ends for a template that takes one text, as in vLLM, and without separator for one that
        takes parts.
        """
        content = message.get("content")
        if not isinstance(content, list):
            return message
        return {**message, "content": ("" if self._takes_parts else "\n").join(part["text"] for part in content)}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        prompt: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Render a conversation. Raises DataError with the template's line when it fails.

        Args:
            prompt: Append the words after which the model answers.
            settings: Other variables of the template.
        """
        if tools and self.tool_source:
            return self.with_tools.render(messages, tools, prompt=prompt, settings=settings)
        turns = [_copy_thoughts(self.joined(message)) for message in messages]
        variables = {
            **(settings or {}),
            **self.special,
            "messages": turns,
            "tools": tools and list(tools),
            "documents": None,
        }
        self._environment.extensions[_Limits.identifier].rounds_left = _MOST_ROUNDS  # type: ignore[attr-defined]  # attribute of the extension
        try:
            text = _join_bounded(self._compiled.generate(**variables, add_generation_prompt=prompt))
        except DataError:
            raise
        except _Refusal as error:
            raise MalformedRowError(f"{self.name} fails{_describe_line(error)}: {error.message}") from error
        except jinja2.TemplateError as error:
            raise DataError(f"{self.name} fails{_describe_line(error)}: {error.message}") from error
        except MemoryError as error:
            raise DataError(f"{self.name} fails{_describe_line(error)}: it needs too much memory") from error
        except Exception as error:  # a template fails with whatever Python's own operations fail with
            raise DataError(f"{self.name} fails{_describe_line(error)}: {type(error).__name__}: {error}") from error
        return _extract_spans(text)

    @cached_property
    def _environment(self) -> ImmutableSandboxedEnvironment:
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, _Limits, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _json
        del environment.globals["lipsum"]  # endless words
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = datetime.combine(self.today, time()).strftime
        return environment

    @cached_property
    def _tree(self) -> nodes.Template:
        """Syntax tree. Raises DataError for an invalid template."""
        try:
            return self._environment.parse(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise self._no_template(error) from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            tree = _Limits(self._environment).limited(self._environment.parse(self.source))
            code = self._environment.compile(tree)
            return jinja2.Template.from_code(self._environment, code, self._environment.make_globals(None))
        except jinja2.TemplateSyntaxError as error:
            raise self._no_template(error) from error

    def _no_template(self, error: jinja2.TemplateSyntaxError) -> DataError:
        return DataError(f"{self.name} is no Jinja template: line {error.lineno}: {error.message}")


DEFAULT: Final = """{{ bos_token if bos_token and bos_token != eos_token else '' }}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ '### assistant\\n' }}
{%- generation -%}
{{ (message.content or '') + eos_token }}
{%- endgeneration -%}
{{ '\\n' }}
{%- else -%}
{{ '### ' + message.role + '\\n' + (message.content or '') + '\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '### assistant\\n' }}
{%- endif -%}
"""
"""Template for models without one: a heading per turn, and answers ended by the end-of-text token. It needs no token
that a vocabulary may lack."""
DEFAULT_WITHOUT_BOS: Final = DEFAULT.partition("\n")[2]


THOUGHTS: Final = ("reasoning_content", "thinking", "reasoning")
"""Names of the thoughts before an answer in files and templates. The first present one counts."""


def _copy_thoughts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its thoughts under both names that templates read, as in transformers."""
    thought = next((message[name] for name in THOUGHTS if message.get(name) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def _join_bounded(pieces: Iterator[str]) -> str:
    """Join the pieces. Raises DataError as soon as the text is too long."""
    parts, size = [], 0
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size > _MOST_CHARACTERS:
            raise DataError(f"the chat template writes more than {_MOST_CHARACTERS:,} characters for one conversation")
    return "".join(parts)


def _extract_spans(text: str) -> Rendered:
    """Return the text without marks, and the spans between them."""
    parts, spans, size, begin = [], [], 0, 0
    for piece in text.replace(_END, _END + _BEGIN).split(_BEGIN):
        plain = piece.removesuffix(_END)
        parts.append(plain)
        begin, size = size, size + len(plain)
        if piece.endswith(_END):
            spans.append((begin, size))
    return Rendered("".join(parts), tuple(span for span in spans if span[0] < span[1]))


def _describe_line(error: BaseException) -> str:
    """Return the line of the template that an error comes from."""
    number, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            number = trace.tb_lineno
        trace = trace.tb_next
    return f" in line {number}" if number else ""


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Refusal(jinja2.TemplateError):
    """A template's own refusal of a conversation."""


def _raise(message: str) -> NoReturn:
    raise _Refusal(message)


def _last_name(node: nodes.Node) -> str:
    """Return `content` for `message.content`, `message['content']` and `content`."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return str(node.arg.value)
    return node.name if isinstance(node, nodes.Name) else ""


def _refuses_tools(branch: nodes.If) -> bool:
    """Return whether a branch is `{% if tools %}{{ raise_exception(...) }}{% endif %}`."""
    asks = isinstance(branch.test, nodes.Name) and branch.test.name == "tools"
    calls = (call.node for part in branch.body for call in part.find_all(nodes.Call))
    return asks and any(isinstance(call, nodes.Name) and call.name == "raise_exception" for call in calls)
