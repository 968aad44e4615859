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


OF_THE_STORE = (
    "run.json",
    "run.json.0123456789ab.tmp",
    "probe.0123456789ab.tmp",
    "workers/rank-00001.json",
    "checkpoints/00000004/rank-00000.g00001/.metadata",
    "log/rank-00000/g00001-s000001",
    "runs/run.1-39bf57be/run.json",
    "runs/run.1-39bf57be/journal/00000000-00000018.json",
    "runs/run.1-39bf57be/workers/rank-00000.g0001.json",
)


@pytest.mark.parametrize("store", [".", "out", "deep/store"])
def test_a_file_beside_those_of_the_store_is_compared(tmp_path: Path, store: str) -> None:
    """Also where the store is the folder of the run, or one that the script writes into."""
    own = ("metrics.csv", "logs/a.csv", "checkpoints/best.pt", "log/train.txt", "runs/Nov29_host/events.1.0")
    for name in (*OF_THE_STORE, *own):
        write(tmp_path / store / name)
    assert files_of(tmp_path).keys() == {f"file {Path(store) / name}" for name in own}


def test_a_folder_without_checkpoints_is_no_store(tmp_path: Path) -> None:
    write(tmp_path / "store" / "run.json")
    assert files_of(tmp_path).keys() == {"file store/run.json"}
