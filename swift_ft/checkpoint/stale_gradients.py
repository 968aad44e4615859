"""Stale gradients: those that parameters have between two steps, as zeros or as what the next step zeroes.

An optimizer moves a parameter whose gradient is zero, by its decay and its momentum, and skips one that has
none. So a head that only some steps use moves in all of them after ``zero_grad(set_to_none=False)``. That a
parameter has a gradient is put back, saved and handed over. Its values are not: they become zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

Place = tuple[str, str]
"""The part of the state that has a parameter, and the parameter's name there."""

StaleGradients = Mapping[str, Mapping[int, str]]
"""Stale gradients as they are saved: by part and form, the names of parameters, one in each line."""


def form_of(gradient: torch.Tensor | None) -> int | None:
    """The form of a gradient: its sparse dimensions, 0 if it is dense, None if there is no gradient."""
    if gradient is None:
        return None
    return gradient.sparse_dim() if gradient.is_sparse else 0


def put_form(parameter: torch.Tensor, form: int | None) -> None:
    """Give a parameter zeros of this form as its gradient, or none.

    They are a new tensor: an update may still have to be undone, and that needs the old gradient.
    """
    # A script may have asked for gradients of another dtype. One of any dtype is None.
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    if form is None:
        parameter.grad = None
    elif form == 0:
        parameter.grad = torch.zeros_like(parameter, dtype=dtype)
    else:  # an optimizer for sparse gradients refuses dense ones, and zeros are without elements
        indices = torch.empty((form, 0), dtype=torch.int64, device=parameter.device)
        values = torch.empty((0, *parameter.shape[form:]), dtype=dtype, device=parameter.device)
        parameter.grad = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True)


class NotedGradients:
    """The gradients that parameters have as a step begins, but for their values.

    Args:
        parameters: all that may have one.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._forms = [(parameter, form_of(parameter.grad)) for parameter in parameters]

    def put_back(self) -> None:
        """Give zeros to those that had a gradient, and take it from the others."""
        with torch.no_grad():
            for parameter, form in self._forms:
                put_form(parameter, form)


def forms_of(names: Mapping[torch.Tensor, Place]) -> dict[Place, int]:
    """The forms of the gradients that parameters have, by place.

    Args:
        names: the place of each parameter.
    """
    forms = ((place, form_of(parameter.grad)) for parameter, place in names.items())
    return {place: form for place, form in forms if form is not None}


def put_forms(names: Mapping[torch.Tensor, Place], forms: Mapping[Place, int]) -> None:
    """The inverse of :func:`forms_of`: parameters that are not among these have no gradient then."""
    with torch.no_grad():
        for parameter, place in names.items():
            put_form(parameter, forms.get(place))


def as_saved(forms: Mapping[Place, int]) -> StaleGradients:
    """Forms as they are saved: one text has many names, so thousands take no time to pack."""
    found: dict[str, dict[int, list[str]]] = {}
    for (part, name), form in forms.items():
        found.setdefault(part, {}).setdefault(form, []).append(name)
    return {part: {form: "\n".join(names) for form, names in of.items()} for part, of in found.items()}


def from_saved(saved: StaleGradients) -> dict[Place, int]:
    """The inverse of :func:`as_saved`."""
    return {
        (part, name): form
        for part, forms in saved.items()
        for form, names in forms.items()
        for name in names.split("\n")
    }
