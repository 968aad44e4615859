"""Secrets in what a script says: its errors and last lines are kept, shown, and sent to others. Pure."""

from __future__ import annotations

import re

_LEFT_OUT = "***"
_VALUE = r"[^\s\\&,;\"'<>)}]+"
_NAME = (
    r"(?:(?:access|auth|api|hf|id|refresh|session|bearer)[_-]?)?token|passw(?:or)?d|pwd|secret|api[_-]?key"
)
_KEY = rf"{_NAME}|access[_-]?key(?:[_-]?id)?|secret[_-]?(?:access[_-]?)?key"

# Each has what is kept as its first group; the rest of it is left out.
_SECRETS = (
    # A URL with a user's name and password. Neither holds what ends a URL in a text or in JSON.
    re.compile(r"(://)[^/\s:@\"'<>]*:[^/\s\"'<>]*(?=@)"),
    # A URL that is signed. The names are those of S3, Google and Azure.
    re.compile(
        rf"((?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|[?&](?:Signature|AWSAccessKeyId|sig))=)"
        rf"{_VALUE}",
        re.IGNORECASE,
    ),
    # token=..., password="...": not pad_token=..., which is a model's.
    re.compile(rf"((?<![\w-])(?:{_KEY})\s*=\s*\\?[\"']?){_VALUE}", re.IGNORECASE),
    # {'password': '...'}
    re.compile(rf"([\"'](?:{_KEY})\\?[\"']\s*:\s*\\?[\"']){_VALUE}", re.IGNORECASE),
    # Variables of the environment, such as WANDB_API_KEY=...
    re.compile(rf"(\b[A-Z0-9_]+_(?:TOKEN|PASSWORD|SECRET|KEY)=\\?[\"']?){_VALUE}"),
    re.compile(rf"(\b(?:Bearer|Basic) )(?=\S*\d){_VALUE}"),
)


def without_secrets(text: str) -> str:
    """A text in which known forms of passwords, tokens and signatures are left out."""
    for secret in _SECRETS:
        text = secret.sub(rf"\1{_LEFT_OUT}", text)
    return text
