"""The proof that the command of another world comes from somebody who knows the job's secret.

The journal is in the rendezvous store. Who can write there could otherwise have any program run on all
machines.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence

from swift_ft.network.secret import JobSecret

_LABEL = "command"


def proof_of_command(secret: JobSecret, run_id: str, command: Sequence[str]) -> str:
    """The proof for a command: a script, or a module, and its arguments. As hexadecimal digits."""
    return secret.mac(_LABEL, json.dumps([run_id, *command]).encode()).hex()


def is_proved(proof: str, secret: JobSecret, run_id: str, command: Sequence[str]) -> bool:
    """Whether a proof is the one for a command."""
    return hmac.compare_digest(proof, proof_of_command(secret, run_id, command))
