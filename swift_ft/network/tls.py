"""TLS with the user's own certificates: both sides show one that the user's authority signed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ssl
from dataclasses import dataclass
from pathlib import Path

from swift_ft.errors import UsageError

_TURNS = 2
"""In which both sides of a handshake have heard all that the other one says."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """The files of one machine, as PEM.

    No host name is compared with a certificate: machines come and go, and are known by addresses. The
    handshake (`network/handshake.py`) proves that the server's certificate is that of a member of the job.

    Attributes:
        cert: this machine's certificate, and those between it and the authority.
        key: its private key, without a password.
        ca: the authorities whose certificates are accepted.
    """

    cert: str
    key: str
    ca: str

    def check(self) -> None:
        """Read all three files, once, where the user can still see what is wrong.

        Raises:
            UsageError: one cannot be read, the key is not that of the certificate, or this machine would not
                accept its own certificate.
        """
        for flag, path in (("--tls-cert", self.cert), ("--tls-key", self.key), ("--tls-ca", self.ca)):
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise UsageError(
                    f"{flag} {path} cannot be read ({error.strerror}): check the path."
                ) from error
        try:
            _meet_oneself(self)
            self.binding()
        except ssl.SSLCertVerificationError as error:
            raise UsageError(
                f"--tls-cert {self.cert} is not accepted ({error.verify_message}): give a certificate that "
                f"an authority in --tls-ca {self.ca} has signed."
            ) from error
        except ssl.SSLError as error:
            raise UsageError(
                f"--tls-cert {self.cert}, --tls-key {self.key} and --tls-ca {self.ca} do not fit together "
                f"or are not PEM without a password ({error.reason or error})."
            ) from error

    def server_context(self) -> ssl.SSLContext:
        """For the side that listens. It refuses who shows no certificate."""
        return _context(self, ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext:
        """For the side that connects."""
        return _context(self, ssl.PROTOCOL_TLS_CLIENT)

    def authorities(self) -> bytes:
        """A digest of the certificates in :attr:`ca`, in whatever order they stand there."""
        found = self.client_context().get_ca_certs(binary_form=True)
        return hashlib.sha256(b"".join(sorted(hashlib.sha256(one).digest() for one in found))).digest()

    def binding(self) -> bytes:
        """The digest of this machine's certificate, as :func:`binding_of` sees it from the other side."""
        return _binding(self)


def binding_of(line: ssl.SSLSocket) -> bytes:
    """The digest of the certificate that the other side has shown."""
    return hashlib.sha256(line.getpeercert(binary_form=True) or b"").digest()


@functools.cache
def _context(files: Certificates, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files.cert, files.key, password=_no_password)
    context.load_verify_locations(files.ca)
    return context


def _meet_oneself(files: Certificates) -> None:
    """Do the handshake of two machines that both have these files, in memory.

    Raises:
        ssl.SSLError: it fails.
    """
    upward, downward = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        files.client_context().wrap_bio(downward, upward),
        files.server_context().wrap_bio(upward, downward, server_side=True),
    )
    for _ in range(_TURNS):
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()


def _no_password() -> str:
    """Else OpenSSL would ask on the terminal."""
    return ""


@functools.cache
def _binding(files: Certificates) -> bytes:
    text = Path(files.cert).read_text()
    begin, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    first = text[begin : end + len(ssl.PEM_FOOTER)]
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).digest()
