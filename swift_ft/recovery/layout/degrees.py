"""Degrees of parallelism as one value, and the layout that follows from it. Pure.

Frameworks count ranks in different orders, so a value says which order is its own: the rank of a slot decides
which node it is on. Short text is read here (``dp=2,tp=2,pp=2``); the names of other frameworks in
``planning/layout/degree_names.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from itertools import accumulate, product
from math import prod

from swift_ft.errors import UsageError
from swift_ft.recovery.layout.mesh import Layout, Stages, stages_of
from swift_ft.recovery.layout.stage_layers import even_layout

AXES = ("dp", "pp", "ep", "dp_shard", "cp", "tp")
"""Axes in the order of a layout's slots: the first one counts slowest."""

PP_SLOWEST = ("pp", "dp", "dp_shard", "ep", "cp", "tp")
"""The order of ranks in torchtitan, Megatron-LM and DeepSpeed."""

REST = -1
"""Stands for as many as are left of all workers."""

MOST = 65_536
"""The largest degree, and the largest product of them."""

SHORT_NAMES = {
    **{axis: axis for axis in AXES},
    "dp_replicate": "dp",
    "sp": "cp",
    "D": "dp",
    "P": "pp",
    "T": "tp",
}
"""Names in short text. Capital letters are Tenplex's."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Numbers of workers along each axis. Their product is the number of workers.

    Attributes:
        dp: replicas of the whole state.
        dp_shard: workers among which a batch is dealt and state is shared, as ``zero`` says (FSDP, ZeRO).
        pp: stages of a pipeline.
        tp: workers that share each tensor.
        cp: workers that share a sequence. They share state as those of ``dp_shard`` do.
        ep: workers among which experts are dealt. Frameworks take them from data parallelism.
        zero: what is shared: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too.
        cut: layers of each stage, without an embedding and a head; empty for an even cut.
        first_more: whether what an even cut leaves over is on the first stages; else on later ones, as in a
            LayerStack.
        stages_per_worker: more than one with an interleaved schedule.
        order: all axes as ranks count them, the slowest first.
    """

    dp: int = 1
    dp_shard: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    cut: tuple[int, ...] = ()
    first_more: bool = False
    stages_per_worker: int = 1
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        for axis in (*AXES, "stages_per_worker"):
            value = getattr(self, axis)
            if not 1 <= value <= MOST:
                raise UsageError(f"{axis}={value}: a degree must be from 1 to {MOST}")
        if self.workers > MOST:
            raise UsageError(f"a layout of {self.workers} devices is too large: {MOST} at most")
        if self.zero not in range(4):
            raise UsageError(f"zero={self.zero}: there are stages 0 to 3")
        if self.cut and (len(self.cut) != self.pp * self.stages_per_worker or min(self.cut) < 1):
            raise UsageError(
                f"a cut into {self.cut} does not fit {self.pp * self.stages_per_worker} stages: "
                "give each of them at least one layer"
            )
        if sorted(self.order) != sorted(AXES):
            raise UsageError(f"the order {self.order} must name {', '.join(AXES)} once each")

    @property
    def workers(self) -> int:
        """The product of all degrees."""
        return prod(getattr(self, axis) for axis in AXES)

    def layout(self, layers: int, *, shared: bool = False) -> Layout:
        """The layout of equal pipelines.

        Args:
            layers: of the model; an embedding and a head may be two of them.
            shared: whether tensors are cut by "ep" and "sp". Workers that share no state are replicas then.

        Raises:
            UsageError: if the layers cannot be dealt to the stages.
        """
        stages = self._stages(layers)
        if shared and not self.zero:
            return Layout((stages,) * (self.dp * self.ep * self.dp_shard * self.cp), tp=self.tp)
        return Layout((stages,) * self.dp, tp=self.tp, ep=self.ep, sp=self.dp_shard * self.cp)

    def ranks(self, *, shared: bool = False) -> tuple[int, ...]:
        """The rank of each slot of :meth:`layout`, as the framework counts."""
        axes = ("dp", "ep", "dp_shard", "cp", "pp", "tp") if shared and not self.zero else AXES
        sizes = {axis: int(getattr(self, axis)) for axis in AXES}
        fastest_first = self.order[::-1]
        products = accumulate((sizes[axis] for axis in fastest_first[:-1]), int.__mul__, initial=1)
        strides = dict(zip(fastest_first, products, strict=True))
        return tuple(
            sum(index * strides[axis] for axis, index in zip(axes, place, strict=True))
            for place in product(*(range(sizes[axis]) for axis in axes))
        )

    def _stages(self, layers: int) -> Stages:
        if self.stages_per_worker > 1:
            raise UsageError(
                f"{self.stages_per_worker} stages per worker are not contiguous layers: a layout has one "
                "stage per worker, leave interleaving out"
            )
        if not self.cut:
            return stages_of(self._even_cut(layers))
        cut = list(self.cut)
        if layers == sum(cut) + 2:  # an embedding and a head
            cut[0] += 1
            cut[-1] += 1
        if layers != sum(cut):
            raise UsageError(
                f"the stages have {sum(cut)} layers and the profile has {layers}: profile the same model, "
                "with or without its embedding and head"
            )
        return stages_of(cut)

    def _even_cut(self, layers: int) -> tuple[int, ...]:
        if self.pp > layers:
            raise UsageError(f"{layers} layers cannot fill {self.pp} stages: choose pp from 1 to {layers}")
        even = even_layout(layers, self.pp)
        return tuple(sorted(even, reverse=True)) if self.first_more else even

    def to_dict(self) -> dict[str, object]:
        """The fields that differ from those of one worker, for JSON."""
        plain = {field.name: field.default for field in fields(self)}
        return {name: getattr(self, name) for name, value in plain.items() if getattr(self, name) != value}


def parse_degrees(text: str, workers: int | None = None) -> Degrees:
    """Degrees from ``dp=2,tp=2,pp=2``; those that are missing are 1.

    Args:
        text: names of :data:`SHORT_NAMES`, in any order. One value may be -1: as many as are left.
        workers: all of them, to be checked; None if they follow from the degrees.

    Raises:
        UsageError: if a name is unknown or there twice, or a value cannot be one or does not fit the workers.
    """
    pairs = []
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            raise UsageError(f"{part.strip()!r} is no degree: write it like tp=4,pp=2,dp=1")
        pairs.append((name.strip(), as_number(name.strip(), value.strip())))
    return from_names(pairs, SHORT_NAMES, workers)


def from_names(
    pairs: Iterable[tuple[str, int]],
    known: Mapping[str, str],
    workers: int | None,
    *,
    rest: str | None = None,
    order: tuple[str, ...] = AXES,
) -> Degrees:
    """Degrees from names and values.

    Args:
        pairs: as they were written.
        known: the axis of each name.
        workers: all of them, or None.
        rest: the axis that takes what is left, if nothing is said of it.
        order: how ranks are counted.

    Raises:
        UsageError: as for :func:`parse_degrees`.
    """
    given: dict[str, int] = {}
    said: dict[str, str] = {}  # by axis, how it was written
    for name, value in pairs:
        if name not in known:
            raise unknown(name, known)
        axis = known[name]
        if axis in said:
            as_what = "" if said[axis] == name else f", as {said[axis]!r} before"
            raise UsageError(f"{name!r} is given twice{as_what}: give it once")
        if value < 1 and value != REST:
            raise UsageError(f"{name}={value} is no degree: it must be 1 or more, or -1 for what is left")
        given[axis], said[axis] = value, name
    left = [axis for axis, value in given.items() if value == REST]
    if len(left) > 1:
        raise UsageError(f"{said[left[0]]!r} and {said[left[1]]!r} are both what is left: give one of them")
    if rest is not None and not left and rest not in given:
        named = next((name for name, axis in known.items() if axis == rest), "data parallelism")
        left, given[rest], said[rest] = [rest], REST, named
    fixed = prod(value for value in given.values() if value != REST)
    words = ", ".join(f"{said[axis]}={value}" for axis, value in given.items() if value != REST) or "nothing"
    if left and workers is None:
        raise UsageError(f"{said[left[0]]} is what is left of all workers: say how many there are")
    if workers is not None and (workers % fixed or (not left and workers != fixed)):
        remedy = "divide them" if left else f"multiply to {workers}"
        raise UsageError(f"{words} do not fit {workers} workers: their product is {fixed}, and must {remedy}")
    for axis in left:
        given[axis] = (workers or 0) // fixed
    return Degrees(
        dp=given.get("dp", 1),
        dp_shard=given.get("dp_shard", 1),
        pp=given.get("pp", 1),
        tp=given.get("tp", 1),
        cp=given.get("cp", 1),
        ep=given.get("ep", 1),
        zero=3 if given.get("dp_shard", 1) > 1 else 0,
        order=order,
    )


def as_number(name: str, value: object) -> int:
    """A whole number from text or JSON.

    Raises:
        UsageError: if it is none.
    """
    if isinstance(value, str) and value.removeprefix("-").isascii() and value.removeprefix("-").isdecimal():
        value = int(value) if len(value) < 20 else MOST + 1
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name}={value} is no degree: it must be a whole number")
    return value


def unknown(name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that is not known, with the nearest one that is."""
    names = list(known)
    nearest = get_close_matches(name, names, n=1, cutoff=0.0) or names[:1]
    return UsageError(f"{name!r} is no degree: the nearest name is {nearest[0]!r}")
