"""Conformance: torchrun's parser has the options that swift-run relies on."""

from __future__ import annotations

import pytest
from torch.distributed.run import get_args_parser

from swift_ft.torch_adapters.versions.launch_options import add_missing_options


@pytest.mark.parametrize("flag", ["--shutdown-timeout", "--shutdown_timeout"])
def test_seconds_for_workers_to_end(flag: str) -> None:
    parser = get_args_parser()
    add_missing_options(parser)
    add_missing_options(parser)  # it is there now
    assert parser.parse_args([flag, "7", "train.py"]).shutdown_timeout == 7
    assert parser.parse_args(["train.py"]).shutdown_timeout is None
