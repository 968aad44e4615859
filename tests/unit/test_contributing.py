"""The hooks before a commit are those of CI, and the forms for issues name commands that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.house import ROOT
from swift_ft.cli.recover.main import parser as recover_parser
from swift_ft.cli.run import parser as run_parser

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))


def test_the_hooks_are_those_of_make_lint() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe is not None
    linted = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert [hook["entry"] for hook in hooks] == linted
    assert all(hook["language"] == "system" and not hook["pass_filenames"] for hook in hooks)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one_that_the_forge_takes(path: Path) -> None:
    form: dict[str, Any] = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_the_form_for_bugs_asks_for_what_tools_write() -> None:
    text = next(path for path in FORMS if path.stem == "bug").read_text()
    flags = {flag for action in run_parser()._actions for flag in action.option_strings}
    assert {flag for flag in re.findall(r"--[a-z-]+", text) if flag != "--out"} <= flags
    verbs = re.findall(r"swift-recover (\w+) STORE([^`]*)`", text)
    assert [verb for verb, _ in verbs] == ["status", "export"]
    for verb, options in verbs:
        assert recover_parser().parse_args([verb, "store", *options.split()])
