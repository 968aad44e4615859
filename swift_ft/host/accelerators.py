"""Accelerators that a program on this host should find, also where no driver shows them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_NONE = ("", "-1", "none", "void", "NoDevFiles")
"""Values of these variables that hide all devices from a program."""
_GIVING = (*_HIDING, "NVIDIA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
"""Variables by which a scheduler or a person gives devices to a program."""
_NODES = ("dev/nvidia[0-9]*", "dev/kfd", "proc/driver/nvidia/gpus/*")
"""Files that a driver has made, in a container those of its own devices."""
_CONTAINERS = (".dockerenv", "run/.containerenv", "run/secrets/kubernetes.io")
_MAKERS = ("0x10de",)
"""NVIDIA. AMD's class and maker are also those of graphics in a processor."""
_CLASSES = ("0x0300", "0x0302")
"""Of PCI: a display and a 3D controller."""


def accelerators_expected(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> bool:
    """Whether something tells of accelerators that a program here may use.

    A torch that is built for an accelerator also trains on hosts without one. So it is asked what a scheduler
    has given, what a driver has made, and outside of containers, which are not given all, the PCI bus: it
    shows a device whose driver is gone.

    Args:
        environ: the launcher's variables.
        root: the folder of all files.
    """
    if any(environ[name] in _NONE for name in _HIDING if name in environ):
        return False
    if any(environ.get(name, "") not in _NONE for name in _GIVING):
        return True
    if any(True for pattern in _NODES for _ in root.glob(pattern)):
        return True
    if "KUBERNETES_SERVICE_HOST" in environ or any((root / name).exists() for name in _CONTAINERS):
        return False
    return any(map(_is_accelerator, root.glob("sys/bus/pci/devices/*")))


def accelerators_seen(root: Path = Path("/")) -> list[str]:
    """The PCI addresses (``0000:19:00.0``) of the accelerators that a driver shows here.

    In a container these are as a rule its own; a privileged one may see all.

    Args:
        root: the folder of all files.
    """
    drawn = (root / "sys/class/drm" / node.name / "device" for node in root.glob("dev/dri/*"))
    made = (device.resolve() for device in drawn if device.exists())
    return [device.name for device in (*root.glob("proc/driver/nvidia/gpus/*"), *made)]


def _is_accelerator(device: Path) -> bool:
    try:
        maker, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return maker in _MAKERS and kind.startswith(_CLASSES)
