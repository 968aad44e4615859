"""TLS with the user's own certificates: both sides show one that the user's authority signed."""

from __future__ import annotations

import functools
import hashlib
import ssl
from dataclasses import dataclass
from pathlib import Path

from swift_ft.errors import UsageError

__all__ = ["Certificates"]


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
            UsageError: one cannot be read, or the key is not that of the certificate.
        """
        for flag, path in (("--tls-cert", self.cert), ("--tls-key", self.key), ("--tls-ca", self.ca)):
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise UsageError(
                    f"{flag} {path} cannot be read ({error.strerror}): check the path."
                ) from error
        try:
            self.server_context()
            self.binding()
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


def _no_password() -> str:
    """Else OpenSSL would ask on the terminal."""
    return ""


@functools.cache
def _binding(files: Certificates) -> bytes:
    text = Path(files.cert).read_text()
    begin, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    first = text[begin : end + len(ssl.PEM_FOOTER)]
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).digest()
