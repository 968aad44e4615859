"""Accelerators that should be there: by what was given, by what a driver has made, by the bus."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_ft.host.accelerators import accelerators_expected, accelerators_seen


def host(folder: Path, *files: str, pci: tuple[str, str] | None = None) -> Path:
    """A folder of all files with some of the kernel's."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    if pci is not None:
        device = folder / "sys/bus/pci/devices/0000:17:00.0"
        device.mkdir(parents=True)
        for name, value in zip(("vendor", "class"), pci, strict=True):
            (device / name).write_text(f"{value}\n")
    return folder


def test_the_devices_that_a_container_sees(tmp_path: Path) -> None:
    """The kernel's files are of all devices of the host; those of drivers are of its own."""
    assert accelerators_seen(tmp_path) == []
    host(
        tmp_path, "proc/driver/nvidia/gpus/0000:19:00.0/information", "dev/dri/renderD129", "dev/dri/by-path"
    )
    for number, address in ((128, "0000:03:00.0"), (129, "0000:83:00.0")):
        drawn = tmp_path / f"sys/class/drm/renderD{number}"
        drawn.mkdir(parents=True)
        device = tmp_path / "sys/devices" / address
        device.mkdir(parents=True)
        (drawn / "device").symlink_to(device)
    assert accelerators_seen(tmp_path) == ["0000:19:00.0", "0000:83:00.0"]


H200 = ("0x10de", "0x030200")


def test_a_host_without_any(tmp_path: Path) -> None:
    assert not accelerators_expected(
        {}, host(tmp_path, pci=("0x1a03", "0x030000"))
    )  # a server's own graphics


def test_a_device_whose_driver_is_gone(tmp_path: Path) -> None:
    assert accelerators_expected({}, host(tmp_path, pci=H200))


def test_a_device_that_is_gone_and_its_driver_is_not(tmp_path: Path) -> None:
    assert accelerators_expected({}, host(tmp_path, "dev/nvidia0"))


@pytest.mark.parametrize("environ", [{"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {}])
def test_a_container_that_was_given_none(tmp_path: Path, environ: dict[str, str]) -> None:
    files = () if environ else (".dockerenv",)
    assert not accelerators_expected(environ, host(tmp_path, *files, pci=H200))
    assert accelerators_expected({**environ, "NVIDIA_VISIBLE_DEVICES": "all"}, tmp_path)


@pytest.mark.parametrize("value", ["", "-1"])
def test_devices_that_are_hidden_on_purpose(tmp_path: Path, value: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": value, "NVIDIA_VISIBLE_DEVICES": "all"}
    assert not accelerators_expected(environ, host(tmp_path, "dev/nvidia0", pci=H200))


def test_devices_that_a_scheduler_has_given(tmp_path: Path) -> None:
    assert accelerators_expected({"SLURM_JOB_GPUS": "0,1"}, tmp_path)
