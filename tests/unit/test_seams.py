"""Private parts of torch are used in two rooms only, where each has a conformance test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "swift_ft"
ROOMS = ("torch_adapters", "torch_core")
"""Of private parts."""

DOCUMENTED = ("_foreach_",)
"""torch documents its multi-tensor kernels under names with an underscore ("Foreach Operations")."""

PRIVATE_ATTRIBUTES = frozenset(
    {
        # Of objects, whose class the syntax does not show: all private parts that this project has ever used.
        *("_version", "_indices", "_values", "_cdata", "_base"),  # tensors and storages
        *("_init_group", "_opt_called", "_wrapped_by_lr_sched", "_zero_grad_profile_name"),  # optimizers
        *("_device_types", "_get_backend", "_backward_hooks", "_post_accumulate_grad_hooks"),
        *(
            "_stage",
            "_stages",
            "_n_microbatches",
            "_has_backward",
            "_loss_fn",
            "_internal_losses",
        ),  # schedules
        *("_check_inputs", "_step_microbatches", "_update_losses", "_compute_loss"),
        *(
            "_stage_meta",
            "_user_meta",
            "_inference_mode",
            "_prepare_forward_infra",
            "_prepare_backward_infra",
        ),
        *("_comm_hooks", "_build_params_for_reducer", "_ddp_init_helper", "_has_rebuilt_buckets"),  # DDP
        *(
            "_stop_workers",
            "_start_workers",
            "_monitor_workers",
            "_rendezvous",
            "_invoke_run",
        ),  # elastic agent
        *("_execution_trace", "_remaining_restarts", "_worker_group", "_exit_barrier", "_store"),
    }
)
"""On anything but ``self``, ``cls`` and ``super()`` these are torch's."""

FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ROOMS)


def is_private(name: str) -> bool:
    """One underscore, and not documented by torch."""
    return name.startswith("_") and not name.startswith(("__", *DOCUMENTED))


def names_from_torch(tree: ast.Module) -> dict[str, str]:
    """What a file's names refer to, where they were imported from torch."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    found[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def dotted(node: ast.expr) -> list[str]:
    """``a.b.c`` as a list; empty for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return [*before, node.attr]
    return []


def is_own(node: ast.expr) -> bool:
    """``self``, ``cls`` or ``super()``."""
    return (isinstance(node, ast.Name) and node.id in ("self", "cls")) or (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    )


def own_names(tree: ast.Module) -> set[str]:
    """Private names that a file gives to attributes of its own: no part of torch."""
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_own(node.value)}
    found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return found | {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def is_torchs_heir(node: ast.ClassDef, torch_names: dict[str, str]) -> bool:
    """Whether a class has a base that was imported from torch."""
    return any((dotted(base) or [""])[0] in torch_names for base in node.bases)


def private_calls_of_super(node: ast.ClassDef) -> Iterator[tuple[int, str]]:
    """``super()._something`` within a class."""
    for part in ast.walk(node):
        if not isinstance(part, ast.Attribute) or not isinstance(part.value, ast.Call):
            continue
        if is_own(part.value) and is_private(part.attr):
            yield part.lineno, f"super().{part.attr}"


def private_parts(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each private part of torch that a file uses, as far as its syntax shows."""
    tree = ast.parse(source)
    torch_names, own = names_from_torch(tree), own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            for alias in node.names:
                name = f"{module}.{alias.name}" if module else alias.name
                if name.split(".")[0] == "torch" and any(is_private(part) for part in name.split(".")):
                    yield node.lineno, name
        elif isinstance(node, ast.Attribute):
            first, *rest = dotted(node) or [""]
            if first in torch_names and is_private(node.attr):
                yield node.lineno, ".".join([torch_names[first], *rest])
            elif node.attr in PRIVATE_ATTRIBUTES - own and not is_own(node.value):
                yield node.lineno, f"(...).{node.attr}"
        elif isinstance(node, ast.ClassDef) and is_torchs_heir(node, torch_names):
            yield from private_calls_of_super(node)
        elif isinstance(node, ast.Constant) and node.value in PRIVATE_ATTRIBUTES - own:
            yield node.lineno, repr(node.value)  # getattr(), setattr(), hasattr()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_parts_of_torch_are_in_their_rooms_only(path: Path) -> None:
    found = [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in private_parts(path.read_text())]
    assert not found, "move these into swift_ft/torch_adapters/ or torch_core/:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from torch.optim import _muon", "torch.optim._muon"),
        ("import torch._C", "torch._C"),
        ("from torch.distributed.checkpoint._traverse import x", "torch.distributed.checkpoint._traverse.x"),
        ("import torch\ntorch._C.x()", "torch._C"),
        ("import torch.nn as nn\nnn.modules._functions", "torch.nn.modules._functions"),
        ("from torch.nn import Module\nModule._apply", "torch.nn.Module._apply"),
        ("from torch.nn import Module\nclass A(Module):\n def f(self): super()._apply(f)", "super()._apply"),
        ("def f(tensor): return tensor._version", "(...)._version"),
        ("def f(x): return getattr(x, '_opt_called')", "'_opt_called'"),
    ],
)
def test_the_test_sees_private_parts(source: str, name: str) -> None:
    assert name in {found for _, found in private_parts(source)}


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._foreach_add_(a, b)",
        "from torch import nn\nnn.__name__",
        "class A:\n    def f(self, other):\n        self._stage = 1\n        return other._stage",
    ],
)
def test_the_test_leaves_other_names_alone(source: str) -> None:
    assert not list(private_parts(source))


@pytest.mark.parametrize("room", [*ROOMS, "torch_adapters/versions"])
def test_the_table_of_a_room_names_every_file_and_its_test(room: str) -> None:
    adapters, tests = PACKAGE / room, ROOT / "tests/unit" / room
    table = ast.get_docstring(ast.parse((adapters / "__init__.py").read_text())) or ""
    for path in adapters.rglob("*.py"):
        file = path.relative_to(adapters)
        of_room = path.name != "__init__.py" and file.parts[0] != "versions"
        assert not of_room or str(file) in table, path
    rows = re.findall(r"^(\S+\.py) .*?(test_\w+\.py)", table, re.MULTILINE)
    assert rows
    for file, test in rows:
        assert not (adapters / file).exists() or (tests / test).exists(), test


@pytest.mark.parametrize(
    "path",
    sorted(p for room in ROOMS for p in (PACKAGE / room).rglob("*.py") if p.name != "__init__.py"),
    ids=lambda path: path.stem,
)
def test_each_adapter_names_the_version_that_it_was_tested_on(path: Path) -> None:
    if list(private_parts(path.read_text())):
        documentation = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert re.search(r"tested on torch \d+\.\d+", documentation), path.relative_to(ROOT)
