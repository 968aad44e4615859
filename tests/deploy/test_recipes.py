"""What can be said of all recipes without a cluster: syntax, schemas, and that every flag exists."""

from __future__ import annotations

import signal
import subprocess
import sys
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from swift_ft.cli import store
from swift_ft.cli.recover.main import parser as recover_parser
from swift_ft.cli.run import parser as run_parser
from swift_ft.config.exit_codes import EXIT_KEPT_OUT, EXIT_USAGE
from tests.deploy.recipes import DEPLOY, MANIFESTS, PAGES, flags_in, manifests, scripts

SCRIPTS = scripts()
OBJECTS = [(path.name, found) for path in MANIFESTS for found in manifests(path)]
NATIVE = [(name, found) for name, found in OBJECTS if found["kind"] != "JobSet"]
KUBERNETES = ("1.31", "1.35")


def object_id(case: Any) -> str:
    return f"{case[0]}-{case[1]['kind']}" if isinstance(case, tuple) else str(case)


def job_set() -> dict[str, Any]:
    [found] = [found for _, found in OBJECTS if found["kind"] == "JobSet"]
    return deepcopy(found)


def stateful_set() -> dict[str, Any]:
    [found] = [found for _, found in OBJECTS if found["kind"] == "StatefulSet"]
    return deepcopy(found)


# --------------------------------------------------------------------------------------------- shell


@pytest.mark.parametrize("name", SCRIPTS)
def test_shell_scripts(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(SCRIPTS[name])
    shell = SCRIPTS[name].partition("\n")[0].split()[-1].rpartition("/")[2]
    for command in (
        ["bash" if shell == "bash" else "sh", "-n", str(path)],
        [str(Path(sys.executable).with_name("shellcheck")), str(path)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


# ----------------------------------------------------------------------------------------- manifests


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("case", NATIVE, ids=object_id)
def test_manifests_fit_the_schemas_of_kubernetes(case: tuple[str, dict[str, Any]], version: str) -> None:
    kubernetes_validate.validate(case[1], version, strict=True)


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_job_of_the_job_set_fits_the_schemas_of_kubernetes(version: str) -> None:
    [replicated] = job_set()["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "machine"}, **replicated["template"]}
    kubernetes_validate.validate(job, version, strict=True)


def test_the_job_set_fits_the_models_of_its_interface() -> None:
    """They are generated from its OpenAPI schema. They ignore a field that does not exist, and lose it."""
    given = job_set()
    model = JobsetV1alpha2JobSet.from_dict(given)
    assert model is not None
    assert missing(given, model.to_dict()) == []


def missing(given: Any, kept: Any, place: str = "") -> list[str]:
    """Where a model has lost something."""
    if isinstance(given, dict):
        found = [f"{place}.{key}" for key in given if key not in kept]
        return found + [
            gap for key in given if key in kept for gap in missing(given[key], kept[key], f"{place}.{key}")
        ]
    if isinstance(given, list):
        return [
            gap
            for n, pair in enumerate(zip(given, kept, strict=True))
            for gap in missing(*pair, f"{place}[{n}]")
        ]
    return [] if given == kept else [place]


def test_a_mistake_in_a_manifest_is_found() -> None:
    wrong = stateful_set()
    wrong["spec"]["template"]["spec"]["containers"][0]["liveness"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="liveness"):
        kubernetes_validate.validate(wrong, KUBERNETES[-1], strict=True)
    spec = {**job_set()["spec"], "failPolicy": {}}
    model = JobsetV1alpha2JobSet.from_dict({**job_set(), "spec": spec})
    assert model is not None
    assert missing(spec, model.to_dict()["spec"], "spec") == ["spec.failPolicy"]


def test_both_ways_have_the_same_pods() -> None:
    """And the numbers that must agree do."""
    plain = stateful_set()["spec"]
    job = job_set()["spec"]["replicatedJobs"][0]["template"]["spec"]
    budget = next(found for _, found in OBJECTS if found["kind"] == "PodDisruptionBudget")
    one, other = plain["template"]["spec"], job["template"]["spec"]
    env = one["containers"][0]["env"]
    env.remove({"name": "STAY", "value": "yes"})
    assert other.pop("restartPolicy") == "Never"
    assert one == other
    assert plain["replicas"] == job["parallelism"] == job["completions"]
    machines = int(next(entry["value"] for entry in env if entry["name"] == "MACHINES"))
    assert budget["spec"]["minAvailable"] == machines < plain["replicas"]
    limit_s = SCRIPTS["drain.sh"].split("--timeout ")[1].split()[0]
    assert int(limit_s) < one["terminationGracePeriodSeconds"]


def test_a_machine_that_is_kept_out_ends_no_job() -> None:
    [replicated] = job_set()["spec"]["replicatedJobs"]
    rules = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
    codes = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", ())}
    assert codes == {EXIT_USAGE: "FailJob", EXIT_KEPT_OUT: "Ignore", 128 + signal.SIGTERM: "Ignore"}


# --------------------------------------------------------------------------------------------- flags


def long_flags(parser: ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings}


def verbs() -> dict[str, ArgumentParser]:
    [found] = [action for action in recover_parser()._actions if isinstance(action, _SubParsersAction)]
    return dict(found.choices)


def unknown(text: str) -> Iterator[str]:
    """Flags in a text that no parser of ours knows."""
    for name, verb, flags in flags_in(text):
        if name == "swift-recover":
            parser = verbs().get(verb)
            if parser is None:
                yield f"{name} {verb}"
                continue
        else:
            parser = run_parser() if name == "swift-run" else store.parser()
        yield from (f"{name} {flag}" for flag in flags if flag not in long_flags(parser))


def texts() -> dict[str, str]:
    """The scripts, and the fenced blocks of the pages."""
    pages = {
        str(page.relative_to(DEPLOY.parent)): "\n".join(page.read_text().split("```")[1::2]) for page in PAGES
    }
    return {**SCRIPTS, **pages}


@pytest.mark.parametrize("name", texts())
def test_each_flag_of_a_recipe_exists(name: str) -> None:
    assert list(unknown(texts()[name])) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("start.sh", {"--nnodes", "--local-addr", "--rdzv-endpoint", "--auto-resume", "--metrics-port"}),
        ("drain.sh", {"--rdzv-endpoint", "--rdzv-id", "--timeout"}),
        ("train.sbatch", {"--nnodes", "--rdzv-id", "--auto-resume", "--events-out", "--port"}),
        ("swift-ssh.sh", {"--nnodes", "--node-rank", "--local-addr", "--rdzv-endpoint", "--rdzv-id"}),
    ],
)
def test_the_flags_of_a_recipe_are_seen(name: str, expected: set[str]) -> None:
    seen = {flag for _, _, flags in flags_in(SCRIPTS[name]) for flag in flags}
    assert expected <= seen


def test_a_flag_that_does_not_exist_is_found() -> None:
    text = 'swift-run --nodes 4 \\\n  train.py\nswift-recover drains 3\n"${swift_store[@]}" --ports 1 &\n'
    assert list(unknown(text)) == ["swift-run --nodes", "swift-recover drains", "store --ports"]


# ----------------------------------------------------------------------------------- failure domains


@pytest.mark.parametrize(
    ("address", "domain"),
    [
        (None, []),
        ("node7.cluster", []),
        ("leaf3.node7.cluster", ["--failure-domain", "leaf3"]),
        ("spine.leaf[1,3].node7.cluster", ["--failure-domain", "leaf[1+3]"]),
    ],
)
def test_the_failure_domain_of_a_slurm_node_is_its_switch(address: str | None, domain: list[str]) -> None:
    """A comma would separate the domains of several machines."""
    agent = SCRIPTS["train.sbatch"].partition("\nagent() {")[2].partition("\n}\n")[0]
    command = ["bash", "-c", f'agent() {{{agent}\n}}\nagent "$@"', "agent"]
    env = {"SLURM_NODEID": "0", "SLURMD_NODENAME": "node7.cluster"}
    env |= {} if address is None else {"SLURM_TOPOLOGY_ADDR": address}
    assert said_by([*command, "2", "printf", r"%s\n", "--nnodes", "4", "a b"], env) == [
        *domain,
        *["--nnodes", "4", "a b"],
    ]


@pytest.mark.parametrize(("name", "domain"), [(None, []), ("", []), ("a b", ["--failure-domain", "a b"])])
def test_the_failure_domain_of_a_pod(name: str | None, domain: list[str], tmp_path: Path) -> None:
    launcher = tmp_path / "swift-run"
    launcher.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    launcher.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "STATE": str(tmp_path), "MACHINES": "4", "WORKERS": "1"}
    env |= {"POD_IP": "::1", "RUN": "run7"} | ({} if name is None else {"FAILURE_DOMAIN": name})
    words = said_by(["sh", "-c", SCRIPTS["start.sh"], "start.sh", "train.py"], env)
    assert words[words.index("--metrics-port") + 2 :] == [*domain, "train.py"]


def said_by(command: list[str], env: dict[str, str]) -> list[str]:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()
