"""Gathers the pages for the site in build/docs, and builds it: `make docs`.

    python -m docs.site            # build/site/index.html; needs the extra `docs` (Zensical)
    python -m docs.site --gather   # only build/docs

The pages in the repository stay plain Markdown. Gathering does five things that plain Markdown cannot. It brings in
README, CONTRIBUTING and CHANGELOG, which are outside docs. Links to files of the checkout become plain text, and
pictures links to themselves in full size. And each

    <!-- explorer: MODEL --cluster NAME --nodes N -->

becomes the page that `meshwright explore` writes, embedded. The same goes for movable figures (docs/figures.py).
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from docs import figures
from docs.generate import run

ROOT = Path(__file__).resolve().parent.parent
DOCS, GATHERED, SITE = ROOT / "docs", ROOT / "build" / "docs", ROOT / "build" / "site"
ROOT_PAGES = {"README.md": "project.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
SHIPPED = {".md", ".png", ".svg", ".json", ".css", ".js"}
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")
IMAGE = re.compile(r"(?<!\[)!\[[^\]]*\]\((?P<file>[^)\s]*)\)")
"""A picture that is not inside a link: a narrow window shows it too small to read, so it links to itself."""
EXPLORER = re.compile(r"<!-- explorer: (?P<words>.+?) -->")


def places() -> dict[Path, Path]:
    """Where each file of the site comes from, and where it goes, from the folder of the site's sources."""
    targets = {path: path.relative_to(DOCS) for path in sorted(DOCS.glob("**/*")) if path.suffix in SHIPPED}
    del targets[figures.FOLDER / "README.md"]  # for those who write figures
    targets |= {ROOT / name: Path(to) for name, to in ROOT_PAGES.items()}
    return {path: to.with_name("index.md") if to.name == "README.md" else to for path, to in targets.items()}


def gathered(source: Path, to: dict[Path, Path]) -> str:
    """A page with its links as they lead in the site."""
    here = to[source].parent

    def link(match: re.Match[str]) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        target_page = to.get((source.parent / target).resolve())
        if target_page is None:
            return match["text"]
        return f"{match['image']}[{match['text']}]({os.path.relpath(target_page, here).replace(os.sep, '/')}{anchor})"

    return IMAGE.sub(r"[\g<0>](\g<file>)", LINK.sub(link, source.read_text(encoding="utf-8")))


def explorer(words: str, here: Path) -> str:
    """The explorer's page of a plan, written beside the others and embedded."""
    name = re.sub(r"[^\w.]+", "-", words) + ".html"
    file = GATHERED / "explorers" / name
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        code, _, complained = run(("explore", *words.split(), "--out", str(file)))
        if code:
            raise SystemExit(f"explore {words}: {complained}")
    address = os.path.relpath(Path("explorers") / name, here).replace(os.sep, "/")
    return (
        f'<iframe class="explorer" src="{address}" title="Layout explorer: {words}" loading="lazy"></iframe>\n\n'
        f'<p><a href="{address}" target="_blank">Open this explorer in a page of its own</a></p>'
    )


def embedded(text: str, here: Path) -> str:
    """A page with its explorers and figures in place of the comments that ask for them."""
    return figures.embedded(EXPLORER.sub(lambda match: explorer(match["words"], here), text), here)


def gather() -> None:
    """Fill build/docs anew."""
    shutil.rmtree(GATHERED, ignore_errors=True)
    to = places()
    for source, target in to.items():
        file = GATHERED / target
        file.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix != ".md":
            shutil.copy(source, file)
            continue
        file.write_text(embedded(gathered(source, to), target.parent), encoding="utf-8")


def main(words: Sequence[str] | None = None) -> int:
    """Gather and build; the exit code of the generator."""
    reader = argparse.ArgumentParser(prog="python -m docs.site", description="Build the pages as a site in build/site.")
    reader.add_argument("--gather", action="store_true", help="only gather the pages in build/docs")
    options = reader.parse_args(words)
    gather()
    if options.gather:
        return 0
    shutil.rmtree(SITE, ignore_errors=True)
    built = subprocess.run([sys.executable, "-m", "zensical", "build", "--clean"], cwd=ROOT, check=False)
    print("To read it: python -m http.server -d build/site, then http://localhost:8000 (search needs a server)")
    return built.returncode


if __name__ == "__main__":
    sys.exit(main())
