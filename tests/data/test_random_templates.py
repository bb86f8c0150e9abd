"""Random chat templates: none opens a file, imports, starts a program or runs for ever, whatever they are made of."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.data.chat.encoder import SampleSettings
from meshwright.data.corpus.pool import Pool
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.spec.errors import DataError
from tests.data.test_chat_template import HOSTILE, PIECES

TEMPLATES = 400
LIMIT_S = 1.0
"""Seconds for the rows of one template. Starting a process takes more."""
START_S = 20.0
TAGS = [
    "{% for m in messages %}{{ X }}{% endfor %}", "{% if X %}{{ X }}{% else %}{{ X }}{% endif %}",
    "{% set v = X %}{{ v }}", "{% macro f(a) %}{{ X }}{% endmacro %}{{ f(X) }}", "{% include 'FILE' %}",
    "{% import 'FILE' as m %}{{ m }}", "{% from 'FILE' import a %}", "{% extends 'FILE' %}", "{% include X %}",
    "{% import X as m %}{{ m }}", "{% filter upper %}{{ X }}{% endfilter %}", "{% call(x) f() %}{{ X }}{% endcall %}",
    "{% with v = X %}{{ v() }}{% endwith %}", "{% block b %}{{ self.b }}{{ X }}{% endblock %}", "{{ X }}",
    "{% generation %}{{ X }}{% endgeneration %}", "{% set n = namespace(a=X) %}{% set n.a = X %}{{ n.a }}",
    "{{ X.format(X) }}", "{{ '{0.__class__.__globals__}'.format(X) }}", "{{ X|map('FILTER')|list }}",
    "{{ X|attr('__globals__') }}", "{{ strftime_now('%Y') }}", "{% for i in range(N) %}{% for j in range(N) %}{{ X }}"
    "{% endfor %}{% endfor %}", "{{ 'x' * N }}", "{{ X ** N }}",
]  # fmt: skip
NAMES = [
    *PIECES, "open", "__import__('os')", "eval('1')", "exec", "os", "sys", "config", "request", "get_flashed_messages",
    "cycler.__init__.__globals__.os", "lipsum.__globals__['os'].popen('id')", "joiner.__init__.__builtins__.open",
    "messages[0].content", "messages|first", "()|attr('__class__')", "raise_exception.__globals__", "'FILE'",
]  # fmt: skip
TAILS = [name for name in PIECES if name[0] in ".([|"]
HEADS = [name for name in NAMES if name[0] not in ".([|~+"]

RUN = """
import json, signal, sys
from datetime import date
from meshwright.data.chat.template import ChatTemplate
from meshwright.spec.errors import DataError
import encodings.unicode_escape, jinja2.debug, random, pprint, urllib.parse  # what jinja2 imports when first needed
import resource

resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))

seen, watched = [], [False]
BAD = ("open", "import", "os.", "subprocess.", "socket.", "shutil.", "ctypes.", "tempfile.", "glob.", "pty.")

def hook(event, given):
    if watched[0] and event.startswith(BAD):
        seen.append((event, repr(given)[:200]))

class Late(Exception):
    pass

def late(number, frame):
    raise Late

sys.addaudithook(hook)
signal.signal(signal.SIGALRM, late)
counts = {"written": 0, "refused": 0, "late": 0}
secret = sys.argv[1]
for source in json.load(sys.stdin):
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    watched[0] = True
    try:
        text = ChatTemplate(source, {}, date(2026, 1, 1)).render([{"role": "user", "content": "hello"}]).text
        counts["written"] += 1
        assert secret not in text, source
    except DataError as error:
        watched[0] = False
        counts["late" if isinstance(error.__cause__, Late) else "refused"] += 1
        assert secret not in str(error), source
    except Late:
        counts["late"] += 1
    finally:
        watched[0] = False
        signal.setitimer(signal.ITIMER_REAL, 0)
print(json.dumps([counts, seen]))
"""


def templates(number: int, file: Path) -> list[str]:
    """Tags and expressions at random, hostile ones among them."""
    draw = random.Random(20)
    sources = list(HOSTILE.values())
    while len(sources) < number:
        parts = draw.choices(TAGS, k=draw.randint(1, 4))
        text = "".join(parts)
        while "X" in text:
            text = text.replace("X", draw.choice(HEADS) + "".join(draw.choices(TAILS, k=draw.choice([0, 0, 1, 3]))), 1)
        text = text.replace("N", draw.choice(["3", "3", "10 ** 2", "10 ** 7"]))
        sources.append(text.replace("FILTER", draw.choice(["tojson", "attr", "map"])).replace("FILE", str(file)))
    return sources


def test_no_template_reaches_a_file_a_module_or_a_program(tmp_path: Path) -> None:
    """Python's audit events tell, of every template, what was opened, imported or started while it ran."""
    secret = "a word that is nowhere else"
    (tmp_path / "secret.txt").write_text(secret)
    request = json.dumps(templates(TEMPLATES, tmp_path / "secret.txt"))
    process = subprocess.run(
        [sys.executable, "-c", RUN, secret], input=request, capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, process.stderr[-2000:]
    counts, seen = json.loads(process.stdout)
    assert seen == []
    assert counts["written"] > 50 and counts["refused"] > 50, counts


ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% for i in range(99999) %}{{ f(n) }}{% endfor %}{% endmacro %}{{ f(1) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'word' * 99 }}{% endfor %}{% endfor %}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_an_endless_template_is_ended_in_the_process_that_encodes(source: str) -> None:
    """The process ends for its time or its length, and the error names the row."""
    tokenizer = Tokenizer.bytes()
    settings = SampleSettings(
        template=source, special={}, begins=(), eos=None, today="2026-01-01", template_file="endless.jinja"
    )
    row = json.dumps(["chat.jsonl:1", {"messages": [{"role": "user", "content": "x"}]}])
    packed = json.dumps({name: getattr(settings, name) for name in settings.__slots__})
    begun = time.monotonic()
    with (
        pytest.raises(DataError, match=r"^chat\.jsonl, line 1: the chat template"),
        Pool(tokenizer, 1, samples=packed, limit_s=LIMIT_S) as pool,
    ):
        list(pool.map([(b"\0", [row])]))
    assert time.monotonic() - begun < LIMIT_S + START_S
