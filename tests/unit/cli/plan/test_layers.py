"""``swift-plan layers``: what it writes is what other verbs read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift_ft.cli.plan.main import main
from swift_ft.costs.layer_profile import read_layers

GPT2 = ["layers", "--hidden", "768", "--blocks", "12", "--vocabulary", "50257", "--sequence", "1024"]


def test_a_file_from_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "layers.json"
    assert main([*GPT2, "--tflops", "100", "--tied", "--out", str(out)]) == 0
    assert "12 blocks, each" in capsys.readouterr().out
    assert len(read_layers(out)) == 14
    assert main(["templates", "--layers", str(out), "--nodes", "4", "--min-nodes", "2"]) == 0


def test_measured_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*GPT2, "--tflops", "100", "--measured", "1=10ms/20ms,2=19ms/38ms,4=36ms/72ms", "--json"]
    assert main(argv) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert sum(layer["forward_s"] for layer in layers[1:-1]) == pytest.approx(3 * 0.036)
    assert sum(layer["backward_s"] for layer in layers[1:-1]) == pytest.approx(3 * 0.072)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tflops", "0"], "must be more than 0"),
        (["--tflops", "1", "--blocks", "999999999"], "is too large to plan for: 10000 at most"),
        (["--tflops", "1", "--measured", "1=10ms"], "is no measurement"),
        (["--tflops", "1", "--measured", "2=1ms/1ms"], "without a gap"),
        (["--tflops", "1", "--out", "/nowhere/layers.json"], "cannot be written"),
    ],
)
def test_a_mistake_is_one_line(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT2, *more]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
