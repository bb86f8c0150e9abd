"""Chat templates: texts and marked spans are those of transformers; a hostile template reaches nothing."""

import datetime
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.data.chat import template
from meshwright.data.chat.template import DEFAULT, ChatTemplate
from meshwright.spec.errors import DataError
from tests.data.chats_for_tests import QWEN3, SPELLED, TEMPLATES, TOOLS, conversations, unmarked

DAY = datetime.date(2026, 11, 23)
ALL = {**TEMPLATES, "qwen3": QWEN3, "default": DEFAULT}
USER = [{"role": "user", "content": "hi"}]


def ours(source: str) -> ChatTemplate:
    return ChatTemplate(source, SPELLED, DAY)


def theirs(source: str, messages: list[Any], **more: Any) -> tuple[str, list[tuple[int, int]]]:
    """Return the text that transformers renders, and the spans that it finds generated."""
    utils = pytest.importorskip("transformers").utils.chat_template_utils
    marks = "endgeneration" in source
    texts, spans = utils.render_jinja_template(
        conversations=[messages], chat_template=source, return_assistant_tokens_mask=marks, **SPELLED, **more
    )
    return texts[0], [span for span in (spans[0] if marks else []) if span[0] < span[1]]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.long
def test_texts_and_spans_are_those_of_transformers(name: str, data: st.DataObject) -> None:
    messages = data.draw(conversations(system=name != "gemma"))
    tools = data.draw(st.sampled_from([None, TOOLS]))
    for source in (ALL[name], unmarked(ALL[name])):
        text, spans = theirs(source, messages, tools=tools)
        rendered = ours(source).render(messages, tools)
        assert rendered.text == text
        assert list(rendered.generated) == spans
        asked, _ = theirs(unmarked(source), messages, tools=tools, add_generation_prompt=True)
        assert ours(source).render(messages, tools, prompt=True).text == asked


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson }}",
        "{{ messages | tojson(indent=2) }}",
        "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}",
        "{{ messages | tojson(ensure_ascii=true) }}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
        "{{ undefined_name }}{{ tools is none }}{{ documents is none }}{{ pad_token is defined }}",
        "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}{%- endfor -%}{{ ns.n }}",
        "  {% if true %}\n  x\n  {% endif %}\n  y\n",
        "{{ messages[0].content.split('i')[0].upper().strip() }}{{ messages[-1]['role'] }}",
    ],
)
def test_filters_and_blanks_are_those_of_transformers(source: str) -> None:
    messages = [*USER, {"role": "assistant", "content": "na\u00efve <b> '\"\u2028"}]
    assert ours(source).render(messages).text == theirs(source, messages)[0]


@pytest.mark.parametrize("read", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("message", [{"reasoning_content": "why"}, {"thinking": "why"}, {"reasoning": "why"},
                                   {"thinking": "t", "reasoning": "r"}, {"reasoning_content": "c", "thinking": "t"},
                                   {"reasoning": "", "thinking": None}])  # fmt: skip
def test_thoughts_are_seen_by_each_name_that_transformers_shows_them_by(read: str, message: dict[str, Any]) -> None:
    source = "{% for m in messages %}<think>{{ m." + read + " }}</think>{{ m.content }}{% endfor %}"
    messages = [{"role": "assistant", "content": "a", **message}]
    assert ours(source).render(messages).text == theirs(source, messages)[0]


def test_the_day_is_the_one_given() -> None:
    assert ours("{{ strftime_now('%d %b %Y') }}").render(USER).text == "23 Nov 2026"


def test_spans_of_generated_text_that_is_filtered_later_stay_in_their_place() -> None:
    """transformers counts what was written before, and is wrong for text that is kept first."""
    source = "{% set kept %}{% generation %}hi{% endgeneration %}{% endset %}{{ 'said: ' }}{{ kept | trim }}"
    rendered = ours(source).render(USER)
    assert (rendered.text, rendered.generated) == ("said: hi", ((6, 8),))


HOSTILE = {
    "attribute": "{{ ''.__class__ }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "by item": "{{ ''['__class__'] }}",
    "by filter": "{{ '' | attr('__class__') }}",
    "by format": "{{ '{0.__class__.__init__}'.format('') }}",
    "by map": "{{ [''] | map(attribute='__class__') | list }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of a helper": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "of a bound method": "{{ strftime_now.__self__ }}",
    "of a cycler": "{{ cycler.__init__.__globals__.os }}",
    "of itself": "{{ self.__init__.__globals__ }}",
    "a coroutine": "{{ (lipsum | attr('__code__')) }}",
    "include": "{% include '/etc/hostname' %}",
    "import": "{% import 'os' as os %}{{ os.getcwd() }}",
    "extends": "{% extends '/etc/hostname' %}",
    "builtin": "{{ open('/etc/hostname').read() }}",
    "import call": "{{ __import__('os').getcwd() }}",
    "eval": "{{ eval('1') }}",
    "encoder": "{{ {} | tojson(cls=cycler) }}",
    "fallback": "{{ lipsum | tojson(default=raise_exception) }}",
    "change the messages": "{{ messages.append(1) }}",
    "change a message": "{{ messages[0].update({'role': 'x'}) }}",
    "range": "{% for i in range(10 ** 7) %}{% endfor %}",
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_templates_reach_nothing(attack: str) -> None:
    messages = [dict(USER[0])]
    try:
        text = ours(HOSTILE[attack]).render(messages).text
    except DataError as error:
        assert str(error).startswith("the chat template fails")
    else:
        assert text in ("", "{}", "[Undefined]", "[]", "{0.__class__.__init__}"), text
    assert messages == USER


PIECES = [
    "''", "messages", "self", "lipsum", "cycler", "joiner", "namespace", "range", "dict", "strftime_now",
    "raise_exception", "loop", ".__class__", ".__init__", ".__globals__", ".__self__", ".__builtins__", ".mro()",
    "['__class__']", "|attr('__class__')", "|map(attribute='__class__')|list", "()", "('id')", "[0]", ".gi_frame",
    ".format", "|tojson", "|list", "|string", "~", "+", ".environment", ".__code__", ".f_globals", "._module",
]  # fmt: skip
SECRETS = ("<class", "<module", "builtins", "<frame", "<code", "Environment object")

GIVEN = re.compile(r"<class '(jinja2\.utils\.\w+|range|dict)'>|dict\['\w+'\]")
"""Ways in which names of every template are shown. `dict.x` is a type by its name, `dict['x']`."""


@settings(max_examples=150, deadline=None)
@example(pieces=["''", ".__class__", "~", "cycler"])
@example(pieces=["dict", ".__builtins__"])
@given(pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=6))
def test_random_expressions_show_nothing_of_python(pieces: list[str]) -> None:
    try:
        text = ours("{{ " + "".join(pieces) + " }}").render(USER).text
    except DataError as error:
        assert str(error).startswith("the chat template ")
        return
    if "__" in "".join(pieces):
        text = GIVEN.sub("", text)
        assert not any(secret in text for secret in SECRETS), text


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("a\n{% if %}", "the chat template is no Jinja template: line 2: "
                        "Expected an expression, got 'end of statement block'"),
        ("{{ x | nothing }}", "the chat template is no Jinja template: line 1: No filter named 'nothing'."),
        ("a\n\n{{ 1 / 0 }}", "the chat template fails in line 3: ZeroDivisionError: division by zero"),
        ("a\n{{ messages[7].role }}", "the chat template fails in line 2: list object has no element 7"),
        ("a\n{{ raise_exception('roles must alternate') }}", "the chat template fails in line 2: roles must alternate"),
        ("\n{{ '%d' % 'x' }}", "the chat template fails in line 2: TypeError: "
                               "%d format: a real number is required, not str"),
        ("{{ messages + 'x' }}", "the chat template fails in line 1: TypeError: "
                                 'can only concatenate list (not "str") to list'),
        ("{{ 'x' * 10 ** 15 }}", "the chat template fails in line 1: * makes more than 16,777,216 characters"),
    ],
)  # fmt: skip
def test_a_failing_template_says_where(source: str, sentence: str) -> None:
    with pytest.raises(DataError) as error:
        ours(source).render(USER)
    assert str(error.value) == sentence


def test_an_error_of_any_kind_is_one_of_the_template() -> None:
    with pytest.raises(DataError, match=r"^the chat template fails in line 2: IndexError: "):
        ours("\n{{ '{0}'.format() }}").render(USER)
    with pytest.raises(DataError, match=r"^the chat template fails: SyntaxError: too many statically nested blocks"):
        ours("{% for a in 'b' %}" * 40 + "{% endfor %}" * 40).render(USER)
    with pytest.raises(DataError, match=r"^the chat template fails.*: RecursionError: "):
        ours("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}").render(USER)


def test_endless_output_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "_MOST_CHARACTERS", 10**5)
    nest = "".join(f"{{% for {name} in range(99999) %}}" for name in "abcd") + "word" + "{% endfor %}" * 4
    begin = time.monotonic()
    with pytest.raises(DataError) as error:
        ours(nest).render(USER)
    assert str(error.value) == "the chat template writes more than 100,000 characters for one conversation"
    assert time.monotonic() - begin < 10


def test_no_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    for tag in ("include", "import", "extends"):
        tail = " as x" if tag == "import" else ""
        with pytest.raises(DataError) as error:
            ours(f"{{% {tag} '{tmp_path}/secret'{tail} %}}").render(USER)
        assert "secret" not in str(error.value).replace(str(tmp_path / "secret"), "")


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) ~ f(n + 1) if n < 60 }}{% endmacro %}{{ f(0) }}",
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ [1] * 10 ** 11 }}",
        "{{ '%99999999999d' % 3 }}",
        "{{ 2 ** 1000000000 }}",
        "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x ** 64 %}{% endfor %}",
    ],
)
def test_what_never_ends_or_grows_without_end_is_refused_in_any_process(source: str) -> None:
    """Nothing else bounds a template where a trainer or `generate` runs it."""
    with pytest.raises(DataError, match=r"rounds of loops|characters"):
        ChatTemplate(source, {}, datetime.date(2026, 1, 1)).render([{"role": "user", "content": "a"}])


PARTS = (
    "{% for m in messages %}{% for part in m['content'] %}"
    "{{ part.text if part.text is defined else part }}{% endfor %}{% endfor %}"
)
LOOKED_AT = [{"type": "text", "text": "Look at this:"}, {"type": "text", "text": "1 2 3"}]


def test_parts_of_a_content_are_joined_as_the_template_takes_them() -> None:
    """One that goes through parts gives what transformers gives; one that takes a text has lines, as in vLLM."""
    messages = [{"role": "user", "content": LOOKED_AT}]
    assert ours(PARTS).render(messages).text == theirs(PARTS, messages)[0] == "Look at this:1 2 3"
    for source in TEMPLATES.values():
        assert "Look at this:\n1 2 3" in ours(source).render(messages).text
