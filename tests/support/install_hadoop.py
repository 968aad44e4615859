"""Installs the Debian packages that the HDFS tests need: ``python -m tests.support.install_hadoop``.

Does nothing if all of them are there. Never fails: if it cannot install them, it says why, and the tests that
need the packages are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess

from benchmarks.lib.hadoop import install_command, missing_packages

_TIMEOUT_S = 900.0
_LOCK_TIMEOUT_S = 120  # another apt may be running


def main() -> None:
    """Installs what is missing, if this user may."""
    packages = missing_packages()
    if not packages:
        return
    refusal = _refusal() or _install(packages)
    if refusal:
        print(f"The HDFS tests will be skipped: {refusal}. Install: {install_command(packages)}")


def _refusal() -> str | None:
    if shutil.which("apt-get") is None:
        return "there is no apt-get to install their Debian packages"
    if os.geteuid() != 0:
        return "only root may install their Debian packages"
    return None


def _install(packages: list[str]) -> str | None:
    """Returns why it failed, or None."""
    print(f"Installing {len(packages)} Debian packages for the HDFS tests: {' '.join(packages)}", flush=True)
    apt = ["apt-get", "-qq", "-o", f"DPkg::Lock::Timeout={_LOCK_TIMEOUT_S}"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    failure = ""
    # If an update fails (one of several sources is down), the packages may still install.
    for step in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
        try:
            done = subprocess.run(
                [*apt, *step],
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            return f"apt-get {step[0]} did not end within {_TIMEOUT_S:g} s"
        failure = f"apt-get {step[0]} failed ({done.stderr.strip()[-300:]})" if done.returncode else ""
    if failure:
        return failure
    left = missing_packages()
    return f"apt-get succeeded, but files of these packages are missing: {' '.join(left)}" if left else None


if __name__ == "__main__":
    main()
