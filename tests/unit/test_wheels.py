"""Which packages a machine with a GPU gets as wheels (`tests/support/wheels.py`)."""

from __future__ import annotations

from pathlib import Path

from tests.support.wheels import missing, needed


def test_what_the_machine_has_is_not_downloaded() -> None:
    names = [requirement.partition(">")[0] for requirement in needed()]
    assert {"immutables", "tenacity", "pytest", "expecttest"} <= {*names}
    assert not {"torch", "numpy", "pyarrow", "fsspec", "xxhash"} & {*names}
    assert len(names) == len({*names})


def test_only_wheels_of_what_is_not_installed_are_missing(tmp_path: Path) -> None:
    wheels = [tmp_path / f"{name}-1.0-py3-none-any.whl" for name in ("pytest", "py_spy", "no_such_package")]
    assert [*missing(wheels)] == [wheels[2]]
