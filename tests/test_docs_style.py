"""Pages are written as the guide in CONTRIBUTING says: short sentences, standard words, nothing stale."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ("docs/accuracy.md", "docs/claims.md", "docs/support.md", "docs/parallel_speed.md", "docs/benchmarks.md")
"""Evidence: tables that programs write, and records of what was measured. So are docs/decisions and the changelog."""
MOST_WORDS = 30
WIDEST = 120
BANNED = {
    r"\bdear(er)?\b": "expensive",
    r"\bfor ever\b": "deadlock",
    r"\bleft aside\b": "pruned",
    r"\bas its page says\b": "link the page",
    r"\btold\b": "printed, given",
    r"\b(is|are) no [a-z]+ of\b": "is not a",
    r"\beach place\b": "each stage",
    r"\b(bytes?|calls?|seconds|FLOP|tokens) a (parameter|step|token|call|device|second|GPU|element|layer)\b": "per",
    r"\b(step|tokens/s|seconds|s|bytes) a (step|device|GPU)\b": "per",
}
"""Words of the guide that are not used -> what to write."""
TITLE = re.compile(r"^#+ .*$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
GENERATED_PART = re.compile(r"<!-- generated: .+? -->.*?<!-- /generated -->", re.DOTALL)


def written() -> list[Path]:
    """Pages that people write for readers."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    pages += [
        ROOT / "docs" / "benchmarks" / "README.md",
        *(ROOT / "docs" / "learn").glob("*.md"),
        *(ROOT / "docs" / "lookup").glob("*.md"),
    ]
    return sorted(page for page in pages if shown(page) not in GENERATED)


def shown(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(text: str) -> str:
    """A page without code blocks, tables, headings and generated parts; inline code counts as one word."""
    text = GENERATED_PART.sub("\n\n", text)
    text = FENCED.sub("\n\n", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^(    |\t).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    text = TITLE.sub("\n\n", text)
    text = re.sub(r"^\s*([-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]+`", "CODE", text)
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences(text: str) -> list[str]:
    """Sentences of prose. A full stop ends one where white space and no small letter follow."""
    actual = []
    for paragraph in re.split(r"\n\s*\n", prose(text)):
        words = " ".join(paragraph.split())
        actual += re.split(r"(?<=[.?!])[*_)\"]*\s+(?=[^a-z\s])", re.sub(r"\b(et al|e\.g|i\.e|vs|cf)\.", r"\1", words))
    return [sentence for sentence in actual if sentence]


def long_sentences(text: str) -> list[str]:
    return [sentence for sentence in sentences(text) if len(re.findall(r"[\w'-]+", sentence)) > MOST_WORDS]


def banned_words(text: str) -> list[str]:
    """Every word that the guide replaces, with what to write."""
    actual = " ".join(prose(text).split())
    return [f"{match[0]!r}: {better}" for word, better in BANNED.items() for match in re.finditer(word, actual)]


def wide_lines(text: str) -> list[str]:
    """Lines of prose that do not fit a terminal; tables and code may be as wide as they are."""
    text = FENCED.sub("", GENERATED_PART.sub("", text))
    return [line for line in text.splitlines() if len(line) > WIDEST and not line.startswith(("|", "    ", "!", "<"))]


def faults(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [f"more than {MOST_WORDS} words: {long_sentence}" for long_sentence in long_sentences(text)] + banned_words(
        text
    )


@pytest.mark.parametrize("page", written(), ids=shown)
def test_a_page_keeps_the_guide(page: Path) -> None:
    actual = faults(page)
    assert not actual, "\n".join([shown(page), *actual])


def close_percents(text: str) -> list[str]:
    """Percent signs without a space in prose and tables; what a program prints has none."""
    text = re.sub(r"^(    |\t).*$", "", FENCED.sub("", text), flags=re.MULTILINE)
    return re.findall(r"\S*\d%(?![0-9A-F]{2})", re.sub(r"`[^`\n]+`", "CODE", text))


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]), ids=shown)
def test_a_page_writes_5_percent_in_one_way(page: Path) -> None:
    assert not close_percents(page.read_text(encoding="utf-8")), "write 5 %, not 5%"


def test_the_readme_fits_a_terminal() -> None:
    assert not wide_lines((ROOT / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", written(), ids=shown)
def test_a_page_begins_with_what_it_is_for(page: Path) -> None:
    """A title, then a paragraph: neither code nor a list of files."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert lines[0].startswith("# ")
    assert re.match(r"[A-Z*]", lines[1]) and not lines[1].startswith(("Files:", "Tests:")), lines[1]


@pytest.mark.parametrize("page", written(), ids=shown)
def test_what_is_not_built_yet_names_its_place(page: Path) -> None:
    """`not built yet` is said with the file it will have, in italics, and that file is not there."""
    for paragraph in re.split(r"\n(?=[|\n])", page.read_text(encoding="utf-8")):
        if re.search(r"(is|are|:) not built yet|\| not built yet", paragraph):
            names = re.findall(r"\*([\w./]+)\*", paragraph)
            assert names, paragraph
            there = [name for name in names if (ROOT / name).exists() or (ROOT / "src/meshwright" / name).is_file()]
            assert not there, f"{there} exists: {paragraph}"


def test_the_checks_find_what_they_look_for() -> None:
    long = " ".join(["word"] * (MOST_WORDS + 1))
    assert long_sentences(f"# Title\n\nShort. {long.capitalize()}.") and not long_sentences(f"```\n{long}\n```")
    assert not long_sentences("One and two. " * 20) and not long_sentences(f"| {long} |")
    assert close_percents("It is 5% off. 5 % is not, nor `5%`.\n\n    MFU 50%\n") == ["5%"]
    assert wide_lines("x" * (WIDEST + 1)) and not wide_lines("| " + "x" * WIDEST)
    assert banned_words("It costs 4 bytes a parameter, which is dear.") and not banned_words(
        "`dear`, 4 bytes per token"
    )
