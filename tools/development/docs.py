"""Builds the documentation: the public headers and the pages as a static site, and checks both.

Doxygen reads copies that this module makes. In the copies of headers, comments after members have the form that
Doxygen reads, and labels such as "Throws:" begin a paragraph. In the copies of pages, links lead to pages of the site.
"""

import html
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import markdown_pages
from console import Stop, heading, say
from debian_packages import install_packages
from places import HERE, ROOT, locked

# Groups of pages, in the order of the sidebar: by name, or all below a folder that no earlier group has.
GROUPS = {
    "start": ("Start here", ("docs/tour.md", "docs/install.md")),
    "training": ("Training", ("docs/fully_shard.md", "docs/traps.md", "docs/embedding.md", "docs/planning_tables.md",
                              "docs/state.md", "docs/migrating.md", "docs/trainers/", "docs/examples/")),
    "tools": ("The tools", ("docs/cli/ckpt-inspect.md", "docs/cli/ckpt-reshard.md", "docs/object-stores.md", "docs/recipes.md", "docs/combine.md", "docs/from/", "docs/python.md", "docs/cli/")),
    "docs-formats": ("Formats on disk", ("docs/formats/",)),
    "docs-decisions": ("Decisions", ("docs/decisions/",)),
    "project": ("The project", ("docs/requirements.md", "docs/performance.md", "docs/architecture.md",
                                "docs/glossary.md", "docs/contributing.md", "docs/testing.md", "CHANGELOG.md", "docs/")),
}
FOLDER_PAGES = {"docs/formats": "docs-formats", "docs/decisions": "docs-decisions", "docs": "index"}

LABELS = re.compile(r"(^\s*///(?: @brief)?|(?<=[.;:)`])(?: @details)?) (Shapes?|Units?|Requires|Layout|Output|Collective|Throws|Cost|Memory|Source"
                    r"|Writes|Optimizers)(?: [a-z][a-z ]*)?: ")
OF_CONTAINERS = {"value_type", "size_type", "difference_type", "reference", "const_reference", "iterator", "const_iterator",
                 "data", "begin", "end", "size", "empty", "front", "back", "clear", "reserve", "resize", "push_back",
                 "emplace_back",
                 "erase", "swap"}
BEHIND = re.compile(r"^(?P<code>\s*(?!//)\S.*?\s+)// (?P<text>[^\"]*)$")
COMMENT = re.compile(r"^(?P<indentation>\s+)// (?P<text>.*)$")


def prepared_header(text: str) -> str:
    """Returns a header in the form that Doxygen reads, with the same lines."""
    lines: list[str] = []
    block: list[str] = []
    friend = ""  # a friend declaration so far: it needs no comment
    column = None  # column of a trailing comment that continues in the next line
    for line in text.splitlines() + [""]:
        if line.lstrip().startswith("///"):
            block.append(line)
            continue
        lines += prepared_comment(block)
        block = []
        if friend or line.lstrip().startswith("friend "):
            friend += line
            if line.endswith((";", "}")) and friend.count("{") == friend.count("}"):
                friend = ""
            lines.append("")
            continue
        if behind := BEHIND.match(line):
            column = len(behind["code"])
            line = f"{behind['code']}/**< @brief {behind['text']} */"
        elif (more := COMMENT.match(line)) and len(more["indentation"]) == column:
            lines[-1] = lines[-1].removesuffix(" */")
            line = f"{more['indentation']}{more['text']} */"
        else:
            column = None
        lines.append(line)
    return "\n".join(lines)


def prepared_comment(block: list[str]) -> list[str]:
    """Returns the lines of a comment with its first sentence as the brief one, and labels as paragraphs."""
    if not block:
        return []
    text = "\n".join(block)
    plain = re.sub(r"`[^`]*`", lambda code: "x" * len(code[0]), text)
    if sentence := re.search(r"[.](?=\s)", plain):
        text = f"{text[:sentence.end()]} @details{text[sentence.end():]}"
    text = text.replace("///", "/// @brief", 1)
    return [LABELS.sub(lambda label: f"{label[1]} @label{{{label[0][len(label[1]):].strip()[:-1]}}} ", line)
            for line in text.split("\n")]


def page_id(path: str) -> str:
    """Returns the name of a page in the site."""
    if path == "README.md":
        return "index"
    return re.sub(r"[^a-z0-9]+", "-", path.removesuffix(".md").lower())


def site_pages() -> list[str]:
    """Returns the pages that the site has, relative to the root."""
    found = [page.relative_to(ROOT).as_posix() for page in markdown_pages.pages(ROOT)]
    return [page for page in found if page.startswith("docs/") or page in ("README.md", "CHANGELOG.md")]


class Pages:
    """Makes the pages of the site. Puts the files that they link to beside them, as text."""

    def __init__(self, into: Path, site: Path):
        self.into = into
        self.site = site
        self.known = set(site_pages())

    def write(self) -> None:
        self.into.mkdir(parents=True)
        for page in sorted(self.known):
            (self.into / ("README.md" if page == "README.md" else f"{page_id(page)}.md")).write_text(self.prepared(page))
        with (self.into / "README.md").open("a") as main_page:  # the sidebar shows the pages in this order
            main_page.write("\n## All pages\n\n" + "".join(f"- @subpage {name}\n" for name in GROUPS))
        left = set(self.known) - {"README.md"}
        for name, (title, wanted) in GROUPS.items():
            lines = [f"# {title} {{#{name}}}", ""]
            for prefix in wanted:
                for page in sorted(left):
                    if page == prefix or prefix.endswith("/") and page.startswith(prefix):
                        left.discard(page)
                        lines.append(f"- @subpage {page_id(page)}")
            (self.into / f"{name}.md").write_text("\n".join(lines) + "\n")

    def prepared(self, page: str) -> str:
        """Returns a page in the form that Doxygen reads: headings with ids, and links to pages of the site."""
        text = (ROOT / page).read_text()
        lines = text.split("\n")
        for head in markdown_pages.headings(text):
            if head.line == 1 and page == "README.md":
                continue
            identity = page_id(page) if head.line == 1 else f"{page_id(page)}--{head.anchor}"
            lines[head.line - 1] = f"{'#' * head.level} {head.text} {{#{identity}}}"
        text = re.sub(r"(?m)^</?(?:details|summary).*$", r"@htmlonly \g<0> @endhtmlonly", "\n".join(lines))
        text = re.sub(r"\*\*(`[^`*]+`)\*\*", r"<b>\1</b>", text)  # Doxygen's Markdown does not support bold code
        text = markdown_pages.double_backticks(text)  # in `a'`, Doxygen ends the code at the apostrophe
        text = markdown_pages.replace_links(text, lambda text, target: self.image(page, text, target), images=True)
        return markdown_pages.replace_links(text, lambda text, target: self.link(page, text, target))

    def image(self, page: str, text: str, target: str) -> str:
        path = (ROOT / page).parent.joinpath(target).resolve().relative_to(ROOT).as_posix()
        place = f"files/{path}"
        (self.site / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, self.site / place)
        return f'@htmlonly <img src="{place}" alt="{html.escape(text)}"> @endhtmlonly'

    def link(self, page: str, text: str, target: str) -> str:
        if markdown_pages.is_elsewhere(target):
            return f"[{text}]({target})"
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent.joinpath(name).resolve().relative_to(ROOT).as_posix() if name else page
        if path in self.known:
            href = f"{page_id(path)}.html" + (f"#{page_id(path)}--{anchor}" if anchor else "")
        elif path in FOLDER_PAGES:
            href = f"{FOLDER_PAGES[path]}.html"
        else:
            href = self.copied(path)
        return f"<a href=\"{href}\">{text}</a>" if href else text

    def copied(self, path: str) -> str | None:
        """Copies a file of the repository, or the start page of a folder, into the site. Returns its path there; None if there is nothing to copy."""
        file = ROOT / path
        if file.is_dir():
            file = next((file / name for name in ("README.md", "main.cpp") if (file / name).exists()), None)
        if file is None:
            return None
        place = f"files/{file.relative_to(ROOT).as_posix()}.txt"
        (self.site / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, self.site / place)
        return place


def is_described(element: ElementTree.Element) -> bool:
    return any("".join(found.itertext()).strip() for name in ("briefdescription", "detaileddescription")
               if (found := element.find(name)) is not None)


def needs_comment(member: ElementTree.Element, owner: ElementTree.Element, line: str) -> bool:
    """Returns whether a member needs a comment. `line`: where it is declared.

    These need none: members that every class has (constructors, destructor, copies, comparison), members that override,
    members with the names of container members, and accessors whose one line shows what they return. A variable
    needs one only in a struct whose name ends with `Options`.
    """
    name = member.findtext("name") or ""
    owner_name = (owner.findtext("compoundname") or "").split("::")[-1]
    kind = member.get("kind")
    if kind == "friend" or member.get("prot") == "private" or name in OF_CONTAINERS:
        return False
    if kind == "variable":
        return owner_name.endswith("Options") and not re.match(r"\s*enum ", line)
    if kind == "enum":
        values = member.findall("enumvalue")
        return not (values and all(is_described(value) for value in values))
    if kind != "function":
        return True
    if name.startswith(("operator", "~")) or name == owner_name or member.find("reimplements") is not None:
        return False
    return not re.search(r"\(\) const(?: noexcept)? \{ return .*; \}", line)


def undescribed(xml: Path, include: Path) -> list[str]:
    """Returns a line for each public symbol that needs a comment and has none."""
    missing = []
    sources: dict[str, list[str]] = {}

    def note(element: ElementTree.Element, name: str) -> None:
        location = element.find("location")
        missing.append(f"include/{location.get('file')}:{location.get('line')}: {name}: expected a comment, found none")

    for file in sorted(xml.glob("*.xml")):
        if not file.name.startswith(("class", "struct", "union", "namespace")):
            continue
        compound = ElementTree.parse(file).getroot().find("compounddef")
        compound_name = compound.findtext("compoundname") or ""
        if compound.get("prot") == "private":
            continue
        if compound.get("kind") in ("class", "struct", "union"):
            if not is_described(compound):
                note(compound, compound_name)
        described = {member.findtext("name") for member in compound.iter("memberdef") if is_described(member)}
        for member in compound.iter("memberdef"):
            location = member.find("location").get("file")
            if location not in sources:
                sources[location] = (include / location).read_text().splitlines()
            line = sources[location][int(member.find("location").get("line")) - 1]
            # Of several overloads, only one needs a comment.
            if member.findtext("name") not in described and needs_comment(member, compound, line):
                note(member, f"{compound_name}::{member.findtext('name')}")
    return sorted(missing)


def run_doxygen(directory: Path, *, html: bool) -> list[str]:
    """Makes the site, or only what the check reads, in `directory`. Returns Doxygen's complaints."""
    shutil.rmtree(directory, ignore_errors=True)
    site = directory / "site"
    site.mkdir(parents=True)
    for header in sorted((ROOT / "include").rglob("*.h")):
        copy = directory / header.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(prepared_header(header.read_text()))
    Pages(directory / "pages", site).write()
    shutil.copyfile(HERE / "docs.css", directory / "docs.css")
    configuration = (HERE / "docs.Doxyfile").read_text() + (
        f"GENERATE_HTML = {'YES' if html else 'NO'}\nGENERATE_XML = YES\n")
    (directory / "Doxyfile").write_text(configuration)
    done = subprocess.run(["doxygen", "Doxyfile"], cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          check=False)
    if done.returncode != 0:
        raise Stop(f"doxygen ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    for page in site.glob("*.html"):  # Doxygen links names of namespaces that it has no page for
        text = page.read_text()
        linked = re.sub(r'<a (?:class="code [^>]*)?href="(namespace\w+\.html)">(.*?)</a>',
                        lambda link: link[0] if (site / link[1]).exists() else link[2], text)
        if linked != text:
            page.write_text(linked)
    warnings = (directory / "warnings.txt").read_text().splitlines()
    return [line.replace(f"{directory}/", "") for line in warnings]


def check_reference(directory: Path, *, html: bool) -> list[str]:
    """Empties `directory` and runs Doxygen in it. Returns the problems in comments of the public headers."""
    return run_doxygen(directory, html=html) + undescribed(directory / "xml", directory / "include")


def build_docs() -> int:
    """Builds the site into build/reference/site and checks comments and links. Returns the exit code."""
    install_packages({"docs"})
    if not shutil.which("doxygen"):
        raise Stop("doxygen is not installed (apt-get install doxygen)")
    directory = ROOT / "build" / "reference"  # CMake builds the examples in build/docs
    heading("building the documentation")
    with locked(ROOT / "build", "building the documentation"):
        problems = check_reference(directory, html=True)
    problems += markdown_pages.broken_links(ROOT)
    for problem in problems:
        say(problem)
    say(f"build/reference/site/index.html: {len(site_pages())} pages"
        + (f"; {len(problems)} problems, above" if problems else "; every public symbol has a comment, no link is broken"))
    return 1 if problems else 0
