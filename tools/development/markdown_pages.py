"""Reads headings, anchors and links of Markdown pages."""

import dataclasses
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

FENCE = re.compile(r"^\s*(```+|~~~+)")
HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*\s*$")
CODE_SPAN = re.compile(r"(?s)(?<!`)(`+)(?!`)(?:(?!\n\s*\n).)+?(?<!`)\1(?!`)")
LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]\n]|\n(?!\s*\n))*)\]\((?P<target>[^()\s]+)\)")
REFERENCE = re.compile(r"(?m)^ {0,3}\[[^\]]+\]:\s*(?P<target>\S+)")
HTML_LINK = re.compile(r"\b(?:href|src)=\"(?P<target>[^\"]+)\"")
HTML_ANCHOR = re.compile(r"\b(?:id|name)=\"([^\"]+)\"")
ELSEWHERE = re.compile(r"^(?:[a-z][a-z0-9+.-]*:|//)", re.IGNORECASE)


@dataclasses.dataclass
class Heading:
    level: int
    text: str
    anchor: str
    line: int  # from 1


@dataclasses.dataclass
class Link:
    target: str
    line: int  # from 1


def anchor_of(heading: str) -> str:
    """Returns the anchor of a heading, without the number for repeated headings."""
    text = re.sub(r"\[([^\[\]]*)\]\([^()\s]+\)", r"\1", heading)
    text = re.sub(r"[`*]", "", text)
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def outside_code(text: str) -> Iterator[tuple[int, str]]:
    """Yields the lines of a page that are not code (fenced or indented), with their numbers from 1."""
    fence = None
    after_blank = True
    for number, line in enumerate(text.split("\n"), 1):
        found = FENCE.match(line)
        if fence is not None:
            if found and found[1].startswith(fence):
                fence = None
        elif found:
            fence = found[1]
        elif not (after_blank and line.startswith("    ")):
            yield number, line
            after_blank = not line.strip()


def headings(text: str) -> list[Heading]:
    """Returns a page's headings. The anchor of a repeated heading ends in `-1`, `-2`, ..."""
    found: list[Heading] = []
    seen: dict[str, int] = {}
    for number, line in outside_code(text):
        heading = HEADING.match(line)
        if not heading:
            continue
        anchor = anchor_of(heading[2])
        repetition = seen.get(anchor, 0)
        seen[anchor] = repetition + 1
        found.append(Heading(len(heading[1]), heading[2], f"{anchor}-{repetition}" if repetition else anchor, number))
    return found


def without_blocks(text: str) -> str:
    """Returns the page with spaces in place of blocks of code, so that all other characters keep their positions."""
    kept = {number for number, _ in outside_code(text)}
    return "\n".join(line if number in kept else " " * len(line) for number, line in enumerate(text.split("\n"), 1))


def blanked(text: str) -> str:
    """Returns the page with spaces in place of all code, so that all other characters keep their positions."""
    return CODE_SPAN.sub(lambda span: re.sub(r"[^\n]", " ", span[0]), without_blocks(text))


def links(text: str) -> list[Link]:
    """Returns the links of a page, with images and HTML, but without code."""
    plain = blanked(text)
    return [Link(link["target"], plain.count("\n", 0, link.start()) + 1)
            for pattern in (LINK, REFERENCE, HTML_LINK) for link in pattern.finditer(plain)]


def replace_links(text: str, replacement: Callable[[str, str], str], *, images: bool = False) -> str:
    """Returns the page with `replacement(text, target)` in place of every Markdown link outside of code.

    With `images` it replaces every image `![text](target)` instead.
    """
    pieces = []
    end = 0
    for link in LINK.finditer(blanked(text)):
        if bool(link["image"]) != images:
            continue
        pieces += [text[end:link.start()], replacement(text[slice(*link.span("text"))], link["target"])]
        end = link.end()
    return "".join(pieces) + text[end:]


def double_backticks(text: str) -> str:
    """Returns the page with two backticks around each code span that has one on each side and contains `'`."""
    pieces = []
    end = 0
    for span in CODE_SPAN.finditer(without_blocks(text)):
        if span[1] != "`" or "'" not in span[0]:
            continue
        pieces += [text[end:span.start()], f"`{span[0]}`"]
        end = span.end()
    return "".join(pieces) + text[end:]


def anchors(text: str) -> set[str]:
    """Returns the anchors that a link to the page may have."""
    found = {heading.anchor for heading in headings(text)}
    return found | set(HTML_ANCHOR.findall(blanked(text)))


def is_elsewhere(target: str) -> bool:
    """Returns whether a link leads out of the tree."""
    return bool(ELSEWHERE.match(target))


def pages(root: Path) -> list[Path]:
    """Returns the Markdown pages of the tree: those that git tracks, or all without git."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", "*.md"],
        cwd=root, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        return [root / line for line in listed.stdout.splitlines() if (root / line).exists()]
    return sorted(path for path in root.rglob("*.md")
                  if not any(part.startswith((".", "build")) for part in path.relative_to(root).parts))


def broken_links(root: Path) -> list[str]:
    """Returns a line for each broken relative link or anchor of all pages."""
    broken = []
    anchors_of: dict[Path, set[str]] = {}
    for page in pages(root):
        text = page.read_text()
        for link in links(text):
            if is_elsewhere(link.target):
                continue
            where = f"{page.relative_to(root)}:{link.line}: {link.target}"
            name, _, anchor = link.target.partition("#")
            target = (page.parent / name).resolve() if name else page
            if name.startswith("/") or not target.is_relative_to(root.resolve()) and name:
                broken.append(f"{where}: expected a path within the tree")
            elif not target.exists():
                broken.append(f"{where}: no such file")
            elif anchor and target.suffix == ".md":
                if target not in anchors_of:
                    anchors_of[target] = anchors(target.read_text())
                if anchor not in anchors_of[target]:
                    broken.append(f"{where}: no such heading in {target.relative_to(root.resolve())}")
    return broken
