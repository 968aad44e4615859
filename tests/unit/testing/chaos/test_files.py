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


@pytest.mark.parametrize("is_absolute", [True, False])
def test_a_link_is_compared_by_its_target(tmp_path: Path, is_absolute: bool) -> None:
    """To a file, to a folder, or to nothing: wherever the run's folder is."""

    def linked(name: str, target: str) -> dict[str, str]:
        folder = tmp_path / name
        write(folder / "ckpt-4" / "a", "1")
        write(folder / "ckpt-8" / "a", "1")
        (folder / "latest").symlink_to(folder / target if is_absolute else target)
        return files_of(folder)

    one = linked("one", "ckpt-8")
    assert one.keys() == {"file ckpt-4/a", "file ckpt-8/a", "file latest"}
    assert one == linked("same", "ckpt-8")
    assert one != linked("other", "ckpt-4")
    assert one != linked("of a file", "ckpt-8/a")
    assert one != linked("dangling", "ckpt-9")


def test_an_empty_folder_is_compared(tmp_path: Path) -> None:
    (tmp_path / "out" / "empty").mkdir(parents=True)
    assert files_of(tmp_path).keys() == {"file out/empty/"}
    write(tmp_path / "out" / "empty" / "a")
    assert files_of(tmp_path).keys() == {"file out/empty/a"}


def test_a_folder_that_swift_ft_has_left_empty_is_not_compared(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write(store / "run.json")
    own = ("checkpoints/00000004/rank-00000.g00001", "log/rank-00000", "workers", "runs/a/journal")
    for name in (*own, "checkpoints/best", "mine"):
        (store / name).mkdir(parents=True)
    assert files_of(tmp_path).keys() == {"file store/checkpoints/best/", "file store/mine/"}
