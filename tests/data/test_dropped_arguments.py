"""Arguments of calls that a template leaves out: found wherever transformers' text lacks them, and nowhere else."""

import json
from datetime import date
from typing import Any

import pytest

from meshwright.data import rendering
from meshwright.data.chat_template import ChatTemplate
from meshwright.data.rendering import Policy
from meshwright.data.samples import Conversation, sample
from meshwright.spec.errors import DataError

HEAD = "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
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
    "the first of a list": NAME + ITEMS + "{{ k }}={{ v[0] if v is sequence and v is not string else v }};{% endfor %}",
}
ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an integer": ({"at": "x", "n": 7}, {"at": "x", "n": 8}),
    "a float": ({"at": "x", "n": 7.25}, {"at": "x", "n": 8.5}),
    "true": ({"at": "x", "n": True}, {"at": "x", "n": False}),
    "false": ({"n": False}, {"n": True}),
    "0": ({"n": 0}, {"n": 1}),
    "a number in an object": ({"at": {"deep": {"n": 7}}}, {"at": {"deep": {"n": 8}}}),
    "a boolean in an object": ({"at": {"deep": {"n": True}}}, {"at": {"deep": {"n": False}}}),
    "a text in an object": ({"at": {"deep": "x"}}, {"at": {"deep": "y"}}),
    "the second of a list": ({"at": [1, 2]}, {"at": [1, 3]}),
    "a boolean in a list": ({"at": [True, False]}, {"at": [True, True]}),
}


def turns(arguments: Any) -> list[Any]:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    return [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def theirs(source: str, arguments: Any) -> str:
    utils = pytest.importorskip("transformers").utils.chat_template_utils
    found = utils.render_jinja_template(conversations=[turns(arguments)], chat_template=source)
    return str(found[0][0])


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", ARGUMENTS)
@pytest.mark.parametrize("spelled", [False, True])
def test_an_argument_is_missed_where_another_one_gives_the_same_text(kind: str, template: str, spelled: bool) -> None:
    """Transformers renders both; arguments may be given as objects or as their JSON."""
    source = HEAD + TEMPLATES[template] + TAIL
    one, other = ARGUMENTS[kind]
    dropped = theirs(source, one) == theirs(source, other)
    ours = ChatTemplate(source, {}, date(2026, 1, 1))
    given = sample(("chat.jsonl:1", {"messages": turns(json.dumps(one) if spelled else one)}))
    assert isinstance(given, Conversation)
    if dropped:
        with pytest.raises(DataError, match="drops what a tool call of message 2 is given: "):
            rendering.conversation(given, ours, Policy(train_on="all"))
    else:
        [marked] = rendering.conversation(given, ours, Policy(train_on="all"))
        assert marked.text == theirs(source, one)
