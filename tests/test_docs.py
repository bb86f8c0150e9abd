"""Pages do not rot: links lead somewhere, commands and named files exist, the claims page is that of its table."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from claims import record, table
from docs import generate, site, stack_errors
from docs.pictures import draw

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])
CLAIMS = table.load(ROOT / "claims" / "claims.toml")

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
PACKAGES = "|".join(path.name for path in (ROOT / "src" / "meshwright").iterdir() if (path / "__init__.py").exists())
PATH = re.compile(
    rf"^(src|tests|docs|benchmarks|claims|evaluation|examples|{PACKAGES})/[\w./*-]*$|^[\w.-]+\.(md|toml)$|^Makefile$"
)
"""What looks like a path: from the root of the checkout, from the page, or from the package."""


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


each_page = pytest.mark.parametrize("page", PAGES, ids=shown)


def without_blocks(text: str) -> str:
    """The text outside fenced and indented code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^(    |\t).*$", "", text, flags=re.MULTILINE)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Slugs of a page's headings, as the usual renderers make them."""
    headings = re.findall(r"^#+\s+(.*)$", without_blocks(page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for match in LINK.finditer(without_blocks(page.read_text(encoding="utf-8"))):
        target = match[1] or match[2]
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken, f"{shown(page)}: {broken}"


@each_page
def test_files_named_in_a_page_exist(page: Path) -> None:
    """A path in back quotes is a promise; a file that is still to come is written in italics."""
    if page.name in ("CHANGELOG.md", "claims.md"):
        return
    text = without_blocks(page.read_text(encoding="utf-8"))
    named = {name.partition("::")[0].rstrip("/") for name in CODE.findall(text)}
    here = {name for name in named if PATH.match(name)}
    places = (ROOT, page.parent, ROOT / "src" / "meshwright")
    missing = sorted(name for name in here if not any(list(position.glob(name)) for position in places))
    assert not missing, f"{shown(page)} names {missing}"
    # A merge of two modules turns "`a.py`, `b.py`" into the same name twice.
    twice = re.findall(r"(`[\w./]+\.py`),? (?:and )?\1", text)
    assert not twice, f"{shown(page)} names {twice} twice in a row"


@pytest.mark.parametrize(
    ("index", "folder"),
    [
        ("docs/README.md", "docs"),
        ("docs/README.md", "docs/learn"),
        ("docs/README.md", "docs/lookup"),
        ("docs/learn/README.md", "docs/learn"),
        ("docs/decisions/README.md", "docs/decisions"),
    ],
)
def test_an_index_names_every_page_of_its_folder(index: str, folder: str) -> None:
    listed = (ROOT / index).read_text(encoding="utf-8")
    assert not [page.name for page in (ROOT / folder).glob("[!R]*.md") if page.name not in listed]


def code_lines(page: Path) -> Iterator[str]:
    """Lines of a page's code blocks and its inline code, one command each."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for block in re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        yield from block.splitlines()
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"^(?:    |\t)(.*)$", outside, flags=re.MULTILINE)
    yield from CODE.findall(text)


def commands(program: str) -> list[tuple[str, list[str]]]:
    """(page, words after the program) of every command line of that program in the pages."""
    actual = []
    for page in PAGES:
        for line in code_lines(page):
            line = re.sub(r"\s(#|>|\||&&).*$", "", line.strip().removeprefix("$ "))
            if line.startswith(program + " "):
                actual.append((shown(page), shlex.split(line)[1:]))
    return actual


def test_verbs_and_options_in_the_pages_exist() -> None:
    import typer.main

    from meshwright.verbs.commands import application

    verbs = typer.main.get_command(application()).commands  # type: ignore[attr-defined]
    wrong = []
    for page, words in commands("meshwright"):
        if words[0].startswith("-") or words[0].isupper():
            continue
        if words[0] not in verbs:
            wrong.append(f"{page}: meshwright {words[0]}")
            continue
        verb = verbs[words[0]]
        # `data prepare` is a verb of a group.
        verb = getattr(verb, "commands", {}).get(next(iter(words[1:]), ""), verb)
        known = {name for parameter in verb.params for name in (*parameter.opts, *parameter.secondary_opts)}
        # Flags of another program, in quotes, are one word.
        flags = [word for word in words if word.startswith("--") and " " not in word]
        options = {word.partition("=")[0] for word in flags} - {"--help", "--debug"}
        wrong += [f"{page}: meshwright {words[0]} {option}" for option in options - known]
    assert not wrong


def words_that_parse(words: list[str]) -> bool:
    """Not a form such as `meshwright plan MODEL ...` or `meshwright VERB --help`."""
    return not any(re.search(r"^[A-Z]+$|^\.\.\.$|[\[\]|]", word) for word in words)


def test_commands_in_the_pages_are_parsed_by_the_command_line() -> None:
    """By the real parser, with the types of arguments: a plan file, a run folder or FILE need not be there."""
    import typer.main
    from click.exceptions import UsageError

    from meshwright.verbs.commands import USAGE_ERROR, application

    parser = typer.main.get_command(application())
    parsed, wrong = 0, []
    for page, words in commands("meshwright"):
        if len(words) < 2 or words[0] not in parser.commands or not words_that_parse(words):  # type: ignore[attr-defined]
            continue
        verb = parser.commands[words[0]]  # type: ignore[attr-defined]
        inputs = [word for word in words[1:] if word not in ("--debug", "--help")]
        try:
            if inputs:
                verb.make_context(words[0], inputs)
                parsed += 1
        except (USAGE_ERROR, UsageError) as error:  # type: ignore[misc]
            named_only = "requires an argument" in str(error) and words[-1].startswith("--")
            if "does not exist" not in str(error) and not named_only and page != "CHANGELOG.md":
                wrong.append(f"{page}: meshwright {shlex.join(words)}: {error}")
    assert parsed > 50
    assert not wrong, "\n".join(wrong)


def test_plans_of_the_lectures_answer(capsys: pytest.CaptureFixture[str]) -> None:
    from meshwright.verbs.main import main

    plans = {
        tuple(words) for page, words in commands("meshwright") if page == "docs/lectures.md" and words[0] == "plan"
    }
    assert plans
    codes = {shlex.join(words): main(list(words)) for words in sorted(plans)}
    assert set(codes.values()) == {0}, (codes, capsys.readouterr().err)


@pytest.mark.parametrize("page", generate.pages(), ids=shown)
@pytest.mark.long(every=True)
def test_generated_parts_are_what_the_program_says(page: Path) -> None:
    """Keys, verbs, tables of predictions, outputs of `plan`: `make pages` writes them anew."""
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- generated: ") == text.count("<!-- /generated -->") == len(generate.PART.findall(text))
    assert generate.filled(text) == text, f"{shown(page)}: run `make pages`"


@pytest.mark.parametrize("program", [generate, site, stack_errors, draw], ids=lambda program: program.__name__)
@pytest.mark.parametrize(("words", "status"), [(["--help"], 0), (["--chek"], 2)], ids=["help", "a misspelt option"])
def test_a_program_of_the_pages_writes_nothing_when_it_is_asked_for_help(
    program: Any, words: list[str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(*_: object, **__: object) -> None:
        raise AssertionError("it writes")

    for name in ("write_text", "write_bytes", "mkdir"):
        monkeypatch.setattr(Path, name, written)
    monkeypatch.setattr("shutil.rmtree", written)
    with pytest.raises(SystemExit) as ended:
        program.main(words)
    assert ended.value.code == status


def test_the_site_has_every_page_once_and_links_within_itself() -> None:
    def listed(entry: object) -> Iterator[str]:
        for child in entry if isinstance(entry, list) else entry.values() if isinstance(entry, dict) else [entry]:
            yield from [child] if isinstance(child, str) else listed(child)

    names = list(listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    places = site.places()
    pages = [position.as_posix() for position in places.values() if position.suffix == ".md"]
    results = [page for page in pages if page.startswith("benchmarks/gpu_")]  # of users: docs/benchmarks/README.md
    assert sorted(names) == sorted(set(pages) - set(results))
    for source, page in places.items():
        for match in LINK.finditer(without_blocks(site.gathered(source, places)) if source.suffix == ".md" else ""):
            target = (match[1] or match[2]).partition("#")[0]
            if target and not re.match(r"[a-z]+:", target):
                there = Path(*(page.parent / target).parts)
                assert (site.GATHERED / there).resolve().relative_to(site.GATHERED.resolve()) in places.values(), target


def test_a_picture_of_the_site_links_to_itself_once() -> None:
    page = ROOT / "docs" / "learn" / "memory.md"
    text = site.gathered(page, site.places())
    assert text.count("](../pictures/memory.png)](../pictures/memory.png)") == 1
    assert len(site.IMAGE.findall(page.read_text(encoding="utf-8"))) == text.count("[![") == 3
    assert not site.IMAGE.search("[![told](a.png)](b.html)")


def test_make_targets_in_the_pages_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))
    named = [(page, words[0]) for page, words in commands("make") if re.match(r"^[a-z]+$", words[0])]
    assert named
    assert not [f"{page}: make {target}" for page, target in named if target not in targets]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_claim_runs_something_that_exists(claim: table.Claim) -> None:
    words = shlex.split(claim.command)
    if words[1:2] == ["-m"] and words[2] != "pytest":
        module_path = words[2].replace(".", "/")
        exists = (ROOT / f"{module_path}.py").exists() or (ROOT / "src" / module_path / "__main__.py").exists()
        assert exists, f"{claim.command}: there is no {words[2]}"
    for word in words[1:]:
        file, _, test = word.partition("::")
        if not re.search(r"\.py$|^(tests|benchmarks)/", file):
            continue
        assert (ROOT / file).exists(), f"{claim.command}: there is no {file}"
        name = test.partition("[")[0]
        assert not test or re.search(rf"def {re.escape(name)}\b", (ROOT / file).read_text(encoding="utf-8")), word


def test_presets_named_in_the_readme_exist() -> None:
    from meshwright.spec.presets import model_names

    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Models")[2].partition("\n## ")[0]
    named = {name for name in CODE.findall(section) if re.search(r"^[a-z0-9.]+-[a-z0-9.-]+$", name)}
    assert named
    assert named <= set(model_names())


def test_the_claims_page_is_that_of_its_table() -> None:
    """Whoever changes a row writes the page again: `python -m claims.run --page` runs nothing."""
    records = record.load(ROOT / "docs" / "claims.json")
    current = {
        claim.id: records[claim.id] for claim in CLAIMS if claim.id in records and records[claim.id].belongs_to(claim)
    }
    assert (ROOT / "docs" / "claims.md").read_text(encoding="utf-8") == record.page(CLAIMS, current)
