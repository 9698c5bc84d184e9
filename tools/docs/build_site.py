"""Builds the site: README, guide, recipes, commands, reference and specification as HTML.

python3 tools/dev.py docs              into build/site
python3 tools/dev.py docs DIRECTORY    into another directory

The pages are first written as Markdown to a temporary directory, which Sphinx renders.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from tools.docs import commands, reference
from tools.docs.reference import ROOT

HERE: Final = ROOT / "tools" / "docs"
FILES: Final = "https://github.com/onnxarchive/onnxarchive/blob/main"
"""Where links to files lead that are no pages of the site."""

PAGES: Final = {
    "tools/docs/guide.md": "guide.md",
    "tools/docs/damaged.md": "damaged.md",
    "tools/docs/citing.md": "citing.md",
    "spec/specification.md": "specification.md",
    "spec/proposal.md": "proposal.md",
    "conformance/README.md": "conformance.md",
    "tools/bench/README.md": "measurements.md",
    ".github/CHANGELOG.md": "changelog.md",
    ".github/SECURITY.md": "security.md",
    ".github/CONTRIBUTING.md": "contributing.md",
}
"""The pages by file of the repository; the README and the recipes are more than one page each."""

LANGUAGES: Final = {
    ".cpp": "cpp",
    ".html": "html",
    ".json": "json",
    ".mjs": "javascript",
    ".py": "python",
    ".txt": "cmake",
}
"""The languages of programs, by the end of the file's name."""

RULES: Final = tuple(tomllib.loads((ROOT / "spec" / "rules.toml").read_text("utf-8")))
_RULE: Final = re.compile(rf"(?<![\w*\[-])({'|'.join(RULES)})(?![\w-])")
_CODE: Final = re.compile(r"(^ *```.*?^ *```$|`[^`]+`)", re.DOTALL | re.MULTILINE)
_RECIPE: Final = re.compile(r"^\| \[(.+?)\]\((.+?)\) \| (.*) \|$", re.MULTILINE)


def main() -> int:
    """Builds the site; returns the exit status of Sphinx."""
    from sphinx.cmd.build import build_main

    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site"
    shutil.rmtree(target, ignore_errors=True)
    os.environ |= {"COLUMNS": "88", "NO_COLOR": "1"}  # for argparse
    with tempfile.TemporaryDirectory() as directory:
        pages = Path(directory, "pages")
        for name, text in all_pages():
            path = pages / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        shutil.copytree(ROOT / "spec" / "images", pages / "spec" / "images")
        shutil.copytree(ROOT / "tools" / "bench" / "images", pages / "tools" / "bench" / "images")
        options = ["--quiet", "--fail-on-warning", "--conf-dir", str(HERE)]
        options += ["--doctree-dir", str(Path(directory, "doctrees"))]
        status: int = build_main([*options, str(pages), str(target)])
    (target / ".buildinfo").unlink(missing_ok=True)
    return status


def all_pages() -> Iterator[tuple[str, str]]:
    """Yields the path and the Markdown text of each page of the site."""
    home, _, rest = _read("README.md").partition("\n## ")
    yield "index.md", f"{_linked(home, 'README.md', 'index.md')}\n{_read('tools/docs/contents.md')}"
    yield "overview.md", _linked(f"# Overview\n\n## {rest}", "README.md", "overview.md")
    for file, page in PAGES.items():
        yield page, _linked(_read(file), file, page)
    yield from recipes()
    yield "commands.md", commands.page()
    for name, text in reference.pages():
        yield f"reference/{name}.md", text


def recipes() -> Iterator[tuple[str, str]]:
    """Yields the page of all recipes, and a page for each with its programs."""
    folder = "tools/recipes"
    table = _read(f"{folder}/README.md")
    rows = _RECIPE.findall(table)
    contents = "\n".join(_recipe_page(target) for _, target, _ in rows)
    toctree = f"\n```{{toctree}}\n:hidden:\n\n{contents}\n```\n"
    yield "recipes/index.md", _linked(table, f"{folder}/README.md", "recipes/index.md") + toctree
    for title, target, text in rows:
        page = f"recipes/{_recipe_page(target)}.md"
        parts = [f"# {title[0].upper()}{title[1:]}", f"{text[0].upper()}{text[1:]}."]
        parts = [_linked(part, f"{folder}/README.md", page) for part in parts]
        for path in _programs(ROOT / folder / target):
            file = path.relative_to(ROOT).as_posix()
            if path.suffix == ".md":
                parts.append(_linked(_read(file).partition("\n")[2], file, page))
            else:
                language = LANGUAGES[path.suffix]
                parts.append(f"## {path.name}\n\n````{language}\n{_read(file)}````")
        yield page, "\n\n".join(parts)


def _recipe_page(target: str) -> str:
    """Name of the page of a recipe: of its directory, or of its only program."""
    return target.partition("/")[0].removesuffix(".py")


def _programs(target: Path) -> list[Path]:
    """The files that a page shows: the program, or all files of its directory."""
    if target.parent.name == "recipes":
        return [target]
    files = [it for it in target.parent.iterdir() if it.suffix in {".md", *LANGUAGES}]
    return sorted(it for it in files if it.name != "package-lock.json")


def _read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def _linked(text: str, file: str, page: str) -> str:
    """The text of a file as that of a page: its links lead to pages, rules to their paragraphs."""

    def link(found: re.Match[str]) -> str:
        return f"]({_link(found[1], file, page)})"

    def rule(found: re.Match[str]) -> str:
        return f"[{found[1]}]({_relative('specification.md', page)}#{found[1].lower()})"

    text = _outside_code(text, lambda part: re.sub(r"\]\(([^):\s]+)\)", link, part))
    if page == "specification.md":
        anchors = re.compile(rf"^\*\*({'|'.join(RULES)})\*\*", re.MULTILINE)
        text = anchors.sub(lambda found: f"({found[1].lower()})=\n{found[0]}", text)
    if page in ("specification.md", "conformance.md"):
        text = _outside_code(text, lambda part: _RULE.sub(rule, part))
    return text


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Changes a text, but not what is code in it."""
    parts = _CODE.split(text)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))


def _link(target: str, file: str, page: str) -> str:
    """The link of a page to what a file of the repository links to."""
    path, _, heading = target.partition("#")
    found = os.path.normpath(os.path.join(os.path.dirname(file), path)) if path else file
    heading = f"#{heading}" if heading else ""
    if found == "README.md":
        return _relative("overview.md" if heading else "index.md", page) + heading
    if found.startswith("tools/recipes/"):
        name = found.removeprefix("tools/recipes/")
        name = "index" if name == "README.md" else _recipe_page(name)
        return _relative(f"recipes/{name}.md", page) + heading
    if found in PAGES:
        return _relative(PAGES[found], page) + heading
    if found.endswith(".svg"):
        return _relative(found, page)
    return f"{FILES}/{found}{heading}"


def _relative(target: str, page: str) -> str:
    return os.path.relpath(target, os.path.dirname(page))


if __name__ == "__main__":
    sys.exit(main())
