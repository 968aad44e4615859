"""The URL of a store, as fsspec takes it and as people read it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property

_CREATE = "?create=true"


@dataclass(frozen=True)
class StoreUrl:
    """The URL of a store. Credentials in it are used, but never shown: as text it has none.

    Attributes:
        full: credentials included, for fsspec.
        create: a missing bucket is created.
    """

    full: str
    create: bool = False

    @classmethod
    def parse(cls, url: str | os.PathLike[str]) -> StoreUrl:
        """As the user gave it: a URL, or a plain path."""
        full, create, more = os.fspath(url).partition(_CREATE)
        if more or "://" not in full:  # then it is a part of a name
            return cls(os.fspath(url))
        return cls(full, bool(create))

    def __str__(self) -> str:
        return self.redacted(self.full)

    @property
    def has_credentials(self) -> bool:
        """Whether this text, which says none, is too little to use the store."""
        return bool(self._credentials)

    def redacted(self, what: object) -> str:
        """A text for people, such as an error, without the credentials."""
        return str(what).replace(self._credentials, "")

    def child(self, path: str) -> str:
        """The full URL of a path inside."""
        scheme, _, rest = self.full.partition("://")
        return f"{scheme}://{rest.rstrip('/')}/{path}" if rest.strip("/") else f"{scheme}://{path}"

    @cached_property
    def _credentials(self) -> str:
        found = re.search(r"://([^/@]*:[^/]*@)", self.full)
        return found[1] if found else ""
