"""What is drawn in the documents is what the code says, and what they name exists."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.pipelining.stage import PipelineStage

from docs import decision_list
from docs.house import PACKAGE, ROOMS, ROOT, documents
from swift_ft import Session

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
ABOUT_THE_CODE = [DOCS / "architecture.md", DOCS / "walks.md", *sorted(decision_list.FOLDER.glob("*.md"))]
"""Every name in backticks on these pages is one of the code."""

OF_TORCH = {get_optimizer_state_dict.__name__, PipelineStage.get_fwd_recv_ops.__name__}
"""Names of torch that the documents use and the code does not spell out."""

TOP = ("benchmarks/", "docs/", "examples/", "swift_ft/", "tests/")


def test_the_documents_are_drawn_from_what_is() -> None:
    old = [path.name for path, text in documents().items() if path.read_text() != text]
    assert not old, f"{old} are not what the code says any more: run `make docs`"


# ------------------------------------------------------------------------------------------- decisions


def test_the_list_of_decisions_is_complete() -> None:
    decisions = decision_list.read()
    assert [decision.number for decision in decisions.values()] == [*range(1, len(decisions) + 1)]
    assert all(path.name.startswith(f"{decision.number:04d}-") for path, decision in decisions.items())
    page = (decision_list.FOLDER / "index.md").read_text()
    assert page == decision_list.document(decisions), "docs/decisions/index.md is old: run `make docs`"


def test_decisions_that_the_code_refers_to_exist() -> None:
    numbers = {decision.number for decision in decision_list.read().values()}
    referred = {int(number) for number in re.findall(r"\bdecision (\d+)\b", SOURCE)}
    assert referred, "no comment refers to a decision"
    assert referred <= numbers, f"there is no decision {sorted(referred - numbers)}"


def test_the_architecture_names_all_rooms() -> None:
    text = (DOCS / "architecture.md").read_text()
    layers = text[text.index("| layer |") : text.index("| folder |")]
    folders = text[text.index("| folder |") : text.index("## The life of a step")]
    rooms = {room for kind in ROOMS.values() for room in kind}
    of_layers = re.findall(r"`(\w+)/?`", layers)
    assert sorted(of_layers) == sorted(rooms)
    first_cells = [row.split(" | ")[0] for row in folders.splitlines()]
    of_folders = re.findall(r"`(\w+)/`", " ".join(first_cells))
    assert sorted(of_folders) == sorted(room for room in rooms if (PACKAGE / room).is_dir())


def test_the_architecture_names_all_capabilities() -> None:
    lines = (DOCS / "architecture.md").read_text().splitlines()
    row = next(line for line in lines if line.startswith("| `runtime/` |"))
    folders = {path.parent.name for path in (PACKAGE / "runtime").glob("*/__init__.py")}
    assert {*re.findall(r"`(\w+)/`", row)} - {"runtime"} == folders


def test_the_architecture_stays_an_overview() -> None:
    lines = (DOCS / "architecture.md").read_text().splitlines()
    assert len(lines) <= 220, "a decision is a page of its own in docs/decisions"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# A title\n\nArea: code\n\n## Context\n\n## Decision\n", "begins with"),
        ("# 3. A title\n\nArea: cooking\n\n## Context\n\n## Decision\n", "'cooking' is no area"),
        ("# 3. A title\n\nArea: code\n\n## Decision\n", "has the sections"),
    ],
)
def test_a_page_that_is_no_decision_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        decision_list.parse(text)


# ----------------------------------------------------------------------------------------- files and links


def spans_of(text: str) -> Iterator[str]:
    """What stands in single backticks, outside of fenced blocks."""
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose_of(text)))


def prose_of(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def is_path(span: str) -> bool:
    """Whether it names a file or a folder of the repository, and not a pattern, a command or a URL."""
    if not re.fullmatch(r"[\w./-]+", span):
        return False
    return span.startswith(TOP) or ("/" in span and span.endswith((".py", ".md")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = {span for span in spans_of(page.read_text()) if is_path(span)}
    gone = [name for name in named if not ((ROOT / name).exists() or (PACKAGE / name).exists())]
    assert not gone, f"{page.name} names {sorted(gone)}: no such file in the repository or in swift_ft/"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", prose_of(page.read_text()))
    gone = [to for to in targets if "://" not in to and not (page.parent / to).exists()]
    assert not gone, f"{page.name} links to {gone}"


TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"def (test_\w+)", path.read_text())
}


def missing_tests(text: str) -> set[str]:
    """Tests that a text names in backticks, by themselves or behind their file, and that do not exist."""
    named = {span.rpartition("::")[2] for span in spans_of(text)}
    return {name for name in named if re.fullmatch(r"test_\w+", name)} - TESTS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    gone = missing_tests(page.read_text())
    assert not gone, f"{page.name} names {sorted(gone)}: no such test"


def test_a_test_that_is_gone_is_found() -> None:
    here = "`tests/unit/test_documents.py::test_a_test_that_is_gone_is_found`"
    assert missing_tests(f"{here} and `test_that_never_was`") == {"test_that_never_was"}


def missing_pages(text: str) -> list[str]:
    """Pages of ``docs/`` that a text names, by themselves or with a heading, and that are not there."""
    named = dict.fromkeys(re.findall(r"\b(docs/[\w/-]+\.md)(?:#([\w-]+))?", text))
    return [
        f"{page}#{heading}".rstrip("#")
        for page, heading in named
        if not (ROOT / page).exists() or (heading and heading not in headings_of(ROOT / page))
    ]


def headings_of(page: Path) -> set[str]:
    """The anchors of a page, as links have them."""
    titles = re.findall(r"^#+ (.+)$", prose_of(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_pages_that_the_package_names_exist() -> None:
    """Messages lead a user to them, and a page may be renamed."""
    assert not missing_pages(SOURCE)


def test_a_page_that_is_gone_is_found() -> None:
    text = "(docs/guide.md#data), docs/guide.md#no-such, docs/how-to/no-such.md."
    assert missing_pages(text) == ["docs/guide.md#no-such", "docs/how-to/no-such.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_installs_from_no_index(page: Path) -> None:
    """No index has the package: the README says how it is installed, and pages name extras."""
    assert not re.search(r"pip install ['\"]?swift[-_]ft", page.read_text())


# ------------------------------------------------------------------------------------- limitations

LIMITATIONS = {
    r"not (?:been )?(?:yet )?(?:run|tried) (?:yet )?on (?:a GPU|GPUs|CUDA)|not been run on": "nccl.md",
    r"not encrypted|unencrypted|in the clear": "security.md",
    r"etcd is not": "how-to/rendezvous-store.md",
    r"(?:store|host|pod) is lost, the run ends": "faq.md",
    r"number of (?:machines|workers) (?:is fixed|cannot change)": "how-to/elastic.md",
    r"slow (?:GPUs?|machines?) (?:is|are) not (?:found|seen|built)": "how-to/stragglers.md",
}
"""What says that something is not there, and the page of ``docs/`` that says so for all others."""


def second_hand(page: Path, text: str) -> list[str]:
    """The paragraphs and rows that state a limitation of another page, and do not link to that page."""
    found = []
    for part in re.split(r"\n\s*\n|\n(?=\s*[-|] ?)", text):
        for words, home in LIMITATIONS.items():
            is_home = page == DOCS / home
            links = re.findall(r"\]\(([^)#\s]+)", part)
            linked = any((page.parent / to).resolve() == DOCS / home for to in links)
            if re.search(words, " ".join(part.split())) and not is_home and not linked:
                found.append(part)
    return found


# The reference is written from the code, which cannot link.
@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "reference.md"], ids=lambda page: page.name)
def test_a_limitation_is_written_once(page: Path) -> None:
    assert not second_hand(page, page.read_text()), "link to the page that says it: LIMITATIONS above"


def test_a_limitation_of_another_page_is_found() -> None:
    text = "It is a pod.\netcd is not\nsupported.\n\nRequests are not encrypted ([who may](security.md)).\n"
    assert second_hand(DOCS / "guide.md", text) == ["It is a pod.\netcd is not\nsupported."]
    assert not second_hand(DOCS / "security.md", "They are not encrypted.")


# ------------------------------------------------------------------------------------- names of the code


def members_of(node: ast.ClassDef) -> set[str]:
    """Methods and attributes of a class, without those of its bases."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef):
            found.add(part.name)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found.add(part.target.id)
        elif isinstance(part, ast.Assign):
            found.update(target.id for target in part.targets if isinstance(target, ast.Name))
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            found.add(part.attr)
    return found


SOURCE = "\n".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))
WORDS = set(re.findall(r"[A-Za-z_]\w*", SOURCE))
CLASSES: dict[str, set[str]] = {}
for path in sorted(PACKAGE.rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            CLASSES.setdefault(node.name, set()).update(members_of(node))


def names_in(text: str) -> Iterator[str]:
    """Names of the code in backticks, and calls in diagrams."""
    for span in spans_of(text):
        if match := re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?", span):
            yield match[1].removeprefix("self.")
    for diagram in re.findall(r"^```mermaid(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        yield from re.findall(r"([A-Za-z_][\w.]*)\(", diagram)


def exists(name: str) -> bool:
    """Whether a name is one of the code: a member of its class, or else a word of the source."""
    owner, _, member = name.rpartition(".")
    if owner in CLASSES:
        return member in CLASSES[owner]
    return all(part in WORDS or part in OF_TORCH for part in name.split("."))


@pytest.mark.parametrize("page", ABOUT_THE_CODE, ids=lambda page: page.stem)
def test_names_of_the_code_exist(page: Path) -> None:
    names = {name for name in names_in(page.read_text()) if not name.endswith(".py")}
    gone = sorted(name for name in names if not exists(name))
    assert not gone, f"{page.name} names {gone}, which the code does not have"


def test_a_name_that_is_gone_is_found() -> None:
    assert exists("LogReader.receipt")
    assert exists("make_plan")
    assert not exists("LogReader.recipe")
    assert not exists("mak_plan")
    assert is_path("tests/unit/test_nothing.py")
    assert [*spans_of("see `a.py`\n```\n`no`\n```\n")] == ["a.py"]


def test_the_guide_has_each_argument_of_a_session_with_its_default() -> None:
    section = (DOCS / "guide.md").read_text().partition("## Arguments of a session")[2].partition("\n## ")[0]
    said = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, re.MULTILINE))
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(Session).parameters.items()
        if name not in ("state", "store")
    }
    assert said.keys() == defaults.keys()
    plain = {name: value for name, value in defaults.items() if isinstance(value, str)}
    assert {name: said[name] for name in plain} == {name: f'`"{value}"`' for name, value in plain.items()}
    numbers = ("checkpoint_every", "keep_checkpoints", "seed")
    assert {name: said[name] for name in numbers} == {name: str(defaults[name]) for name in numbers}
