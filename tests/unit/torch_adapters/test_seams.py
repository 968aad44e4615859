"""The private parts of torch that are looked for at a start are there, and what is missing is named."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.distributed.pipelining import schedules
from torch.nn.parallel import DistributedDataParallel

from swift_ft.torch_adapters import seams
from swift_ft.torch_adapters.seams import (
    SEAMS,
    Seam,
    is_newer_than_tested,
    missing,
    unprotected,
    warn_if_newer,
)


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.purpose)
def test_they_are_there(seam: Seam) -> None:
    assert missing(seam) == []


@pytest.mark.parametrize(
    "part",
    [
        "torch.nowhere:Tensor",
        "torch:Tensor._no_such_part",
        "torch.nn:Module:_no_such_attribute",
        "torch.nn.parallel.distributed:DistributedDataParallel._no_such | torch.nowhere:x",
    ],
)
def test_what_is_missing_is_named(part: str) -> None:
    assert missing(Seam("nothing", ("torch:Tensor._version", part))) == [part]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (
            "torch.nn:Module.register_buffer(name tensor)",
            " without further arguments",
        ),  # it takes another one
        ("torch.nn:Module._no_such_method(name)", ""),
    ],
)
def test_further_arguments_are_named(part: str, said: str) -> None:
    assert missing(Seam("nothing", (part,))) == [part.partition("(")[0] + said]


@pytest.mark.parametrize("arguments", ["name tensor persistent", "name tensor persistent of_an_older_torch"])
def test_known_arguments_are_no_change(arguments: str) -> None:
    assert missing(Seam("nothing", (f"torch.nn:Module.register_buffer({arguments})",))) == []


def test_a_new_argument_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: object, arg_mbs: object, loss_kwargs: object, weights: object) -> None:
        """As a later torch may have it."""

    monkeypatch.setattr(schedules.PipelineScheduleSingle, "_step_microbatches", step)
    (part,) = unprotected()["pipelines"]
    assert part.endswith(":PipelineScheduleSingle._step_microbatches without further arguments")


def test_one_of_several_is_enough() -> None:
    assert missing(Seam("nothing", ("torch:Tensor._new_name | torch:Tensor._version",))) == []


@pytest.mark.parametrize(
    ("version", "newer"),
    [
        ("2.11.0", False),
        ("2.14.1+cu130", False),
        ("2.15.0.dev20261001", True),
        ("2.15.0+cpu", True),
        ("3.0.0", True),
    ],
)
def test_newer(version: str, newer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "TESTED", ("2.11", "2.14"))
    assert is_newer_than_tested(version) == newer


def test_the_installed_one_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    assert not is_newer_than_tested(torch.__version__)
    warn_if_newer()
    assert not caplog.records


def test_what_a_newer_one_lacks_is_said_in_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_if_newer("9.0.0")
    assert caplog.messages[-1].endswith("all parts that are used are there")
    monkeypatch.delattr(schedules, "_wait_batch_p2p")
    monkeypatch.delattr(DistributedDataParallel, "_sync_buffers")
    assert list(unprotected()) == ["replicas by DistributedDataParallel", "pipelines"]
    with caplog.at_level(logging.WARNING):
        warn_if_newer("9.0.0")
    line = caplog.messages[-1]
    assert "\n" not in line
    assert "it lacks what is needed for replicas by DistributedDataParallel (" in line
    assert "pipelines (torch.distributed.pipelining.schedules:_wait_batch_p2p)" in line
