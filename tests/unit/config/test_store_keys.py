"""All keys of the rendezvous store are made in one file, and no two kinds of them can be the same."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from docs.house import PACKAGE
from docs.reference import template_of
from swift_ft.config import store_keys
from swift_ft.config.store_keys import KINDS, Hex, Kind, PathText

REGISTRY = Path(inspect.getfile(store_keys))
KITS = ("testing/nccl_like/group.py",)
"""It stands in for torch, with keys of its own in a folder of its own."""
TREES = {
    name: ast.parse(path.read_text())
    for path in PACKAGE.rglob("*.py")
    if (name := path.relative_to(PACKAGE).as_posix()) not in KITS and path != REGISTRY
}
"""All other files of the package."""

# ------------------------------------------------------------------------------------------- made elsewhere

TAKES_KEYS = re.compile(
    r"\b(compare_set|delete_key|multi_get|multi_set|PrefixStore)$"
    r"|(store|rendezvous|writer|connection|client|names)\.(set|get|add|check|wait)$"
    r"|offers\.(put|find)$"
)
"""Functions and methods whose first argument is a key, or several."""
FOLDERS = {"swift", *(template_of(kind).partition("/")[0] for kind in KINDS if "/" in template_of(kind))}
NO_KEYS = ("log/", "samples/s")
"""A folder in the store of logs and checkpoints, and a unit."""


class Texts:
    """What a file writes as text, also by the name of a variable or a function of its own."""

    def __init__(self, tree: ast.Module) -> None:
        self._named: dict[str, ast.expr] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._named[node.targets[0].id] = node.value
            elif isinstance(node, ast.FunctionDef) and isinstance(node.body[-1], ast.Return):
                self._named[node.name] = node.body[-1].value or ast.Constant(None)

    def begin(self, node: ast.expr, depth: int = 4) -> str | None:
        """What a text begins with; None for what is no text, or made by something else."""
        if isinstance(node, ast.JoinedStr):
            first = node.values[0] if node.values else ast.Constant("")
            rest = "".join(str(v.value) for v in node.values[1:2] if isinstance(v, ast.Constant))
            return (self.begin(first, depth) or "") + rest
        if isinstance(node, ast.FormattedValue):
            return self.begin(node.value, depth)
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        named = node.func if isinstance(node, ast.Call) else node
        name = named.attr if isinstance(named, ast.Attribute) else getattr(named, "id", "")
        return self.begin(self._named[name], depth - 1) if depth and name in self._named else None


def keys_made_in(tree: ast.Module) -> list[str]:
    """Where a file writes a key, or what only a key begins with."""
    texts = Texts(tree)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in documentation:
            begin = (texts.begin(node) or "").removeprefix("/")  # after something that is not known here
            if "/" in begin and begin.partition("/")[0] in FOLDERS and not begin.startswith(NO_KEYS):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Call):
            begins = [texts.begin(key) or "/" for key in _keys_of(node)]
            if any(begin[0] != "/" for begin in begins):  # a path of HTTP begins so
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def _keys_of(call: ast.Call) -> list[ast.expr]:
    """The keys that a call is given, if it is one of a store."""
    if not call.args or not TAKES_KEYS.search(ast.unparse(call.func).replace("()", "")):
        return []
    key = call.args[0]
    if isinstance(key, ast.List | ast.Tuple):
        return key.elts
    return [key.elt] if isinstance(key, ast.ListComp) else [key]


def test_no_other_file_makes_keys() -> None:
    assert {name: found for name, tree in TREES.items() if (found := keys_made_in(tree))} == {}


@pytest.mark.parametrize(
    "planted",
    [
        'where = f"profile/{rank}"',
        'self._key = "between/parts"',
        '_ROOT = "journal"\nx = f"{_ROOT}/{number}"',
        'store.set("mine", "")',
        'self._rendezvous.check([f"mine/{rank}"])',
        'store.add("mine", 1)',
        'self._offers.find(f"log/{asked_in}/{rank}")',
        '_KEY = "mine"\ndef f(x):\n    x.compare_set(_KEY, "", "")',
        'def _key(rank):\n    return f"mine/{rank}"\nself._store.multi_get([_key(r) for r in ranks])',
        'PrefixStore(f"mine/{generation}", store)',
        'first = f"{prefix}/journal/first"',
    ],
)
def test_a_key_that_another_file_makes_is_found(planted: str) -> None:
    assert keys_made_in(ast.parse(planted))


def test_other_texts_are_no_keys() -> None:
    source = '"""journal/first"""\nfacts.get("claimed")\nf"log-{rank}/x"\nstore.set(store_keys.over(), "1")'
    assert keys_made_in(ast.parse(source)) == []


def test_each_kind_is_used() -> None:
    used = {
        node.attr
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "store_keys"
    }
    assert {kind.make.__name__ for kind in KINDS} - used == set()


# ------------------------------------------------------------------------------------------------ collisions

FORMS = {
    "int": r"\d+",
    "Hex": r"[0-9a-f]+",
    "str": r"[^/]+",
    "PathText": r".+",
    "Sequence[int]": r"\d+(-\d+)*",
}
"""What stands in a key for a parameter, by its type."""
MAY_BE_EMPTY = {"incarnation": "", "layout": ()}
NAMESPACES = {
    "RUN": ["a.1-00000000"],
    "RUN/groups/GENERATION": ["a.1-00000000/groups/7"],
    "NAME/runs": ["a/runs", "a.1-00000000/runs", "names-of-runs/runs"],
    "names-of-runs": ["names-of-runs"],
}
"""Those of a run, of a name, and of all names. A run may have the name of another run."""


def templates(kind: Kind) -> list[str]:
    """The key with its parameters in braces, also without those that may be empty."""
    types = inspect.get_annotations(kind.make)
    empty = {name: value for name, value in MAY_BE_EMPTY.items() if name in types}
    return [template_of(kind), *([template_of(kind, **empty)] if empty else [])]


def pattern_of(kind: Kind, template: str) -> re.Pattern[str]:
    """What all keys of a kind match."""
    types = inspect.get_annotations(kind.make)
    return re.compile(re.sub(r"\\{(\w+)\\}", lambda name: FORMS[types[name[1]]], re.escape(template)))


def keys_of(kind: Kind, template: str, words: Iterable[str]) -> Iterator[str]:
    """Keys of a kind: each parameter is anything that stands in another key in some place."""
    types = inspect.get_annotations(kind.make)
    names = re.findall(r"{(\w+)}", template)
    choices = [[word for word in words if re.fullmatch(FORMS[types[name]], word)] for name in names]
    for chosen in itertools.product(*choices):
        yield template.format_map(dict(zip(names, chosen, strict=True)))


def collisions(kinds: Iterable[Kind]) -> set[tuple[str, str]]:
    """Pairs of kinds of which one key may be both."""
    every = [(kind, template) for kind in kinds for template in templates(kind)]
    literal = {part for _, template in every for part in re.sub(r"{\w+}", "", template).split("/")}
    words = {*literal, "7", "7-7", "a7", "a/b"} - {""}
    patterns = [
        (other.make.__name__, namespace, pattern_of(other, template))
        for other, template in every
        for namespace in NAMESPACES[other.namespace]
    ]
    found = set()
    for kind, template in every:
        for namespace in NAMESPACES[kind.namespace]:
            for key in keys_of(kind, template, words):
                whole = f"{namespace}/{key}"
                for name, place, pattern in patterns:
                    if (
                        name != kind.make.__name__
                        and whole.startswith(f"{place}/")
                        and pattern.fullmatch(whole, len(place) + 1)
                    ):
                        found.add((min(kind.make.__name__, name), max(kind.make.__name__, name)))
    return found


def test_no_two_kinds_of_key_can_be_the_same() -> None:
    assert collisions(KINDS) == set()


def by_rank(rank: int) -> str:
    return f"profile/{rank}"


def by_name(name: str) -> str:
    return f"journal/{name}"


def by_digest(digest: Hex) -> str:
    return f"journal/{digest}/first"


def by_path(path: PathText) -> str:
    return f"digests/saved/{path}"


@pytest.mark.parametrize(
    ("make", "others"),
    [
        (by_rank, {"profile"}),
        (by_name, {"journal_archived", "journal_block", "journal_first"}),
        (by_digest, {"journal_first"}),
        (by_path, {"saved_digests"}),
    ],
)
def test_a_kind_that_may_be_another_one_is_found(make: object, others: set[str]) -> None:
    assert callable(make)
    planted = Kind(make, "", "", "", "RUN")
    found = {name for pair in collisions([*KINDS, planted]) for name in pair}
    assert others <= found
