"""All files of a script are compared, whatever they are called; those of the trial itself are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_ft.testing.chaos.comparison import files_of
from swift_ft.testing.chaos.run_folder import logs_of, new_own, output_of, report_of


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    "name", ["logs/metrics.csv", "tmp/shard.txt", "console", "events.json", "output.log", "deep/logs/a.csv"]
)
def test_a_file_of_the_script_is_compared_under_any_name(tmp_path: Path, name: str) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    write(one / name, "1.0")
    write(other / name, "2.0")
    assert files_of(one).keys() == files_of(other).keys() == {f"file {name}"}
    assert files_of(one) != files_of(other)


def test_what_the_trial_itself_writes_is_not_compared(tmp_path: Path) -> None:
    own = new_own(tmp_path)
    for path in (output_of(tmp_path), report_of(tmp_path), logs_of(tmp_path) / "0.log", own / "states" / "0"):
        assert path.is_relative_to(own)
        write(path)
    assert files_of(tmp_path) == {}


def test_the_store_is_compared_by_its_values_alone(tmp_path: Path) -> None:
    write(tmp_path / "store" / "runs" / "a" / "run.json")
    write(tmp_path / "kept" / "run.json")
    (tmp_path / "kept" / "checkpoints").mkdir()
    write(tmp_path / "kept" / "logs" / "segment")
    assert files_of(tmp_path).keys() == {"file store/runs/a/run.json"}
