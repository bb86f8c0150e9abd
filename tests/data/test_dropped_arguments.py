"""Arguments of calls that a template leaves out: found wherever transformers' text lacks them, and nowhere else."""

import json
from collections.abc import Iterator
from datetime import date
from typing import Any

import pytest

from meshwright.data.chat import completeness, rendering
from meshwright.data.chat.rendering import Policy
from meshwright.data.chat.samples import Conversation, sample
from meshwright.data.chat.template import ChatTemplate
from meshwright.spec.errors import DataError

HEAD = (
    "{{ tools | tojson }}{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
)
TAIL = "{% endfor %}<|end|>{% endfor %}"
NAME = "[{{ c.function.name }}]"
ITEMS = "{% for k, v in c.function.arguments.items() %}"
TEMPLATES = {
    "json": NAME + "{{ c.function.arguments | tojson }}",
    "python": NAME + ITEMS + "{{ k }}={{ v }};{% endfor %}",
    "words": NAME + ITEMS + "{{ k }}={% if v is boolean %}{{ 'yes' if v else 'no' }}{% elif v is float %}"
    "{{ '%.2f' % v }}{% elif v is integer %}{{ '{:,}'.format(v) }}{% else %}{{ v }}{% endif %};{% endfor %}",
    "texts alone": NAME + ITEMS + "{% if v is string %}{{ k }}={{ v }};{% endif %}{% endfor %}",
    "no booleans": NAME + ITEMS + "{% if v is not boolean %}{{ k }}={{ v }};{% endif %}{% endfor %}",
    "no numbers": NAME + ITEMS + "{% if v is boolean or v is not number %}{{ k }}={{ v }};{% endif %}{% endfor %}",
    "no objects": NAME + ITEMS + "{% if v is not mapping %}{{ k }}={{ v }};{% endif %}{% endfor %}",
    "keys alone": NAME + ITEMS + "{{ k }};{% endfor %}",
    "values alone": NAME + ITEMS + "{{ v }};{% endfor %}",
    "no nulls": NAME + ITEMS + "{% if v is not none %}{{ k }}={{ v }};{% endif %}{% endfor %}",
    "loud names": NAME + ITEMS + "{{ k | upper }}={{ v }};{% endfor %}",
    "one by its name": NAME + "{{ c.function.arguments.at }}",
    "names alone at the top": NAME + ITEMS + "{{ k }}={{ v.values() | list if v is mapping else v }};{% endfor %}",
    "the first of a list": NAME + ITEMS + "{{ k }}={{ v[0] if v is sequence and v is not string else v }};{% endfor %}",
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "an integer": {"at": "x", "n": 7},
    "a float": {"at": "x", "n": 7.25},
    "true": {"at": "x", "n": True},
    "false": {"n": False},
    "0": {"n": 0},
    "a text": {"at": "x"},
    "a number in an object": {"at": {"deep": {"n": 7}}},
    "a boolean in an object": {"at": {"deep": {"n": True}}},
    "a text in an object": {"at": {"deep": "x"}},
    "the second of a list": {"at": [1, 2]},
    "a boolean in a list": {"at": [True, False]},
    "null": {"at": "x", "n": None},
    "null alone": {"n": None},
    "many booleans": {f"flag_{number}": number % 3 == 0 for number in range(12)},
    "nothing": {},
}
NULLABLE = [{"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"at": {"type": "string"}, "n": {"type": ["string", "null"]}},
}}}]  # fmt: skip


def others(argument: Any) -> Iterator[Any]:
    """The same with one name or one value that is another."""
    if isinstance(argument, dict):
        for name, part in argument.items():
            yield {(f"{other}s" if other == name else other): content for other, content in argument.items()}
            yield from ({**argument, name: other} for other in others(part))
    elif isinstance(argument, list):
        for index, part in enumerate(argument):
            yield from ([*argument[:index], other, *argument[index + 1 :]] for other in others(part))
    else:
        yield (
            not argument
            if isinstance(argument, bool)
            else "z"
            if argument is None
            else f"{argument}z"
            if isinstance(argument, str)
            else argument + 1
        )


def turns(arguments: Any) -> list[Any]:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    return [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def theirs(source: str, arguments: Any) -> str:
    utils = pytest.importorskip("transformers").utils.chat_template_utils
    rendered = utils.render_jinja_template(conversations=[turns(arguments)], chat_template=source, tools=NULLABLE)
    return str(rendered[0][0])


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", ARGUMENTS)
@pytest.mark.parametrize("spelled", [False, True])
def test_an_argument_is_missed_where_another_one_gives_the_same_text(kind: str, template: str, spelled: bool) -> None:
    """Transformers renders both; arguments may be given as objects or as their JSON."""
    source, arguments = HEAD + TEMPLATES[template] + TAIL, ARGUMENTS[kind]
    text = theirs(source, arguments)
    dropped = any(theirs(source, other) == text for other in others(arguments))
    row = sample(
        ("chat.jsonl:1", {"messages": turns(json.dumps(arguments) if spelled else arguments), "tools": NULLABLE})
    )
    assert isinstance(row, Conversation)
    ours = ChatTemplate(source, {}, date(2026, 1, 1))
    if dropped:
        with pytest.raises(DataError, match="drops what a tool call of message 2 is given: "):
            rendering.render_conversation(row, ours, Policy(train_on="all"))
    else:
        [marked] = rendering.render_conversation(row, ours, Policy(train_on="all"))
        assert marked.text == text


@pytest.mark.parametrize(
    ("template", "arguments", "renderings"),
    [
        ("json", {"at": "x", "n": 7}, 1),
        ("json", {f"flag_{number}": True for number in range(200)}, 2),
        ("words", {f"n_{number}": number for number in range(200)}, 2),
        ("loud names", {f"n_{number}": None for number in range(200)}, 3 + 8),
        ("json", {"flags": [True] * 200}, 2 + 8),
        ("one by its name", {"at": "x"}, 3),
    ],
)
def test_renderings_of_a_check_do_not_grow_with_arguments(
    template: str, arguments: dict[str, Any], renderings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the one that is trained on: once with signs, once with other words where it has none, then one by one."""
    counted = []

    def render(self: ChatTemplate, *arguments: Any, **more: Any) -> Any:
        counted.append(arguments)
        return plain(self, *arguments, **more)

    messages, plain = turns(arguments), ChatTemplate.render
    ours = ChatTemplate(HEAD + TEMPLATES[template] + TAIL, {}, date(2026, 1, 1))
    text = ours.render(messages, NULLABLE).text
    monkeypatch.setattr(ChatTemplate, "render", render)
    completeness.check_complete(messages, NULLABLE, [1], text, ours)
    assert len(counted) == renderings
