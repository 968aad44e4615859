"""The example training, whose replacement of worker 1 finds the log damaged (DAMAGE=flip|truncate|delete)
or computes something else once (DAMAGE=diverge)."""

import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import train_swift

REPLACED = os.environ["RANK"] == "1" and os.environ["SWIFT_LAUNCHED"] != "1"


def survivors_segments(store: Path) -> list[Path]:
    """The segments of worker 1's neighbours; they appear when the survivors have flushed."""
    for _ in range(600):
        found = [sorted((store / f"log/rank-0000{rank}").glob("*.arrow")) for rank in (0, 2)]
        if all(found):
            return [paths[-1] for paths in found]
        threading.Event().wait(0.05)
    raise TimeoutError("the survivors did not flush")


def damage(how: str, path: Path) -> None:
    data = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif how == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def diverge_once() -> None:
    build_stage = train_swift.build_stage

    def build(*args: object) -> object:
        module = build_stage(*args)

        def perturb(module: object, inputs: object, output: object) -> object:
            handle.remove()
            return output + 1e-3

        handle = module.register_forward_hook(perturb)
        return module

    train_swift.build_stage = build


if REPLACED:
    how = os.environ["DAMAGE"]
    if how == "diverge":
        diverge_once()
    else:
        store = Path(sys.argv[sys.argv.index("--store") + 1])
        damage(how, survivors_segments(store)[0])
train_swift.main()
