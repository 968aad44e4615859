"""Payloads from one replica to another: a whole state, or some parameters with their optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from swift_ft.checkpoint.saved_form import laid_out, own_strides
from swift_ft.checkpoint.state_payload import StatePath, StatePayload
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.torch_core.shards import describe, local, note_changed, rebuilt


def whole_payload(own: TrainingState) -> StatePayload:
    """All that the session protects.

    Raises:
        UnsupportedError: a value could not be read again.
    """
    return StatePayload.of(own.to_save())  # each bucket has a digest on its way


def parameters_payload(own: TrainingState, indices: Sequence[int]) -> StatePayload:
    """Some parameters, with what optimizers keep of them."""
    tensors: dict[StatePath, torch.Tensor] = {}
    plain: dict[int, dict[str, Any]] = {}
    for index in indices:
        optimizer, parameter = own.parameters[index]
        state = optimizer.state.get(parameter, {})
        tensors["parameter", str(index)] = local(parameter).detach()
        fields = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
        tensors.update({("state", str(index), k): local(v) for k, v in fields.items()})
        plain[index] = {
            "values": {k: v for k, v in state.items() if k not in fields},
            "host": [k for k, v in fields.items() if local(v).device.type == "cpu"],
            "shards": {k: part for k, v in fields.items() if (part := describe(v))},
            "strides": own_strides(fields, parameter),
        }
    return StatePayload(tensors, own.pack(plain))


def put_parameters(own: TrainingState, indices: Sequence[int], payload: StatePayload) -> None:
    """Put some parameters in place that :func:`parameters_payload` has made."""
    plain = own.unpack(payload.plain)
    indexed = own.parameters
    with torch.no_grad():
        for index in indices:
            optimizer, parameter = indexed[index]
            local(parameter).copy_(payload.tensors["parameter", str(index)])
            note_changed(parameter)
            optimizer.state[parameter] = dict(plain[index]["values"])
    for (kind, index_text, *field), tensor in payload.tensors.items():
        if kind != "state":
            continue
        optimizer, parameter = indexed[int(index_text)]
        described = plain[int(index_text)]
        values = laid_out(tensor, parameter, described["strides"].get(field[0]))
        if part := described["shards"].get(field[0]):
            value = rebuilt(values, part, parameter)
        else:
            on_host = field[0] in described["host"]  # step counters, as a rule
            value = values if on_host else values.to(parameter.device)
        optimizer.state[parameter][field[0]] = value
