"""A fleet's certificate authority, its server's certificate, and a private key for every device.

The authority keeps its key when its certificate is renewed, so devices with the old certificate and devices with the
new one accept the same server.
"""

import base64
import datetime
import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

VALID_DAYS = 365  # of a server's certificate
AUTHORITY_FACTOR = 5  # the authority's certificate is valid for so many times as long
WARN_DAYS = 30  # before a certificate ends
DAY = datetime.timedelta(days=1)
LOOPBACK = ("localhost", "127.0.0.1")
CA_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fedloom fleet")])
DISABLED_KEY_USAGES = {
    "content_commitment": False,
    "key_encipherment": False,
    "data_encipherment": False,
    "key_agreement": False,
    "encipher_only": False,
    "decipher_only": False,
}
PEM, OPENSSH = serialization.Encoding.PEM, serialization.Encoding.OpenSSH


@dataclass(frozen=True)
class Authority:
    """The files of a certificate authority, of which only ca.crt is copied to devices."""

    folder: Path
    days: int = VALID_DAYS  # for which new certificates of the server are valid

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def server_certificate(self) -> Path:
        return self.folder / "server.crt"

    @property
    def server_key(self) -> Path:
        return self.folder / "server.key"

    def certify(self, host: str) -> None:
        """Write a new key and certificate for the server that devices reach at this host.

        The authority's certificate is renewed if it would end earlier.
        """
        signer, key = self._signing_key(), _generate_key()
        if read_end(self.certificate) < _now() + self.days * DAY:
            self.renew()
        names = [_general_name(name) for name in dict.fromkeys((host, *LOOPBACK))]
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host[:64])])
        authority_key_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
        builder = _certificate_builder(subject, key, self.days, is_ca=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(authority_key_id, critical=False)
        self.server_certificate.write_bytes(builder.sign(signer, hashes.SHA384()).public_bytes(PEM))
        _write_private(self.server_key, key, serialization.PrivateFormat.PKCS8)

    def renew(self) -> None:
        """Write a new certificate of the authority, with the same key."""
        self._write_certificate(self._signing_key())

    def ends(self) -> list["CertificateEnd"]:
        """When the server's and the authority's certificates end."""
        return [CertificateEnd(path.name, read_end(path)) for path in (self.server_certificate, self.certificate)]

    def _write_certificate(self, key: ec.EllipticCurvePrivateKey) -> None:
        builder = _certificate_builder(CA_NAME, key, AUTHORITY_FACTOR * self.days, is_ca=True)
        self.certificate.write_bytes(builder.sign(key, hashes.SHA384()).public_bytes(PEM))

    def _signing_key(self) -> ec.EllipticCurvePrivateKey:
        """The authority's own key, generated on first use."""
        path = self.folder / "ca.key"
        if path.exists():
            stored = serialization.load_pem_private_key(path.read_bytes(), None)
            assert isinstance(stored, ec.EllipticCurvePrivateKey)  # written below
            return stored
        key = _generate_key()
        self._write_certificate(key)
        _write_private(path, key, serialization.PrivateFormat.PKCS8)
        return key


@dataclass(frozen=True)
class CertificateEnd:
    """A certificate's file and the time at which it ends."""

    file: str
    end: datetime.datetime
    now: datetime.datetime = field(default_factory=lambda: _now(), compare=False)

    @property
    def days_left(self) -> int:
        """Whole days; negative once it has ended."""
        return (self.end - self.now) // DAY

    @property
    def has_ended(self) -> bool:
        return self.end <= self.now

    @property
    def ends_soon(self) -> bool:
        return self.days_left < WARN_DAYS

    def __str__(self) -> str:
        when = f"{self.end:%Y-%m-%d}"
        return f"{self.file} ended on {when}" if self.has_ended else f"{self.file} ends on {when}"

    def record(self) -> dict[str, str | int]:
        return {"file": self.file, "ends": self.end.isoformat(), "days_left": self.days_left}


def read_end(path: Path) -> datetime.datetime:
    """When the certificate in this file ends."""
    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc


def is_renewed(old: bytes, new: bytes) -> bool:
    """True if one certificate of an authority (PEM) is a later one of the other, with the same key."""
    try:
        before, after = (x509.load_pem_x509_certificate(pem) for pem in (old, new))
        after.verify_directly_issued_by(before)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return before.public_key() == after.public_key() and after.not_valid_after_utc > before.not_valid_after_utc


def public_key_header(path: Path) -> str:
    """The public key of the private key in this file, as Flower's devices send it: PEM in base64."""
    key = serialization.load_ssh_private_key(path.read_bytes(), None)
    pem = key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(pem).decode("ascii")


def create_device_key(path: Path) -> str:
    """Write a private key to this file; return its public key in OpenSSH's one-line format."""
    key = _generate_key()
    _write_private(path, key, serialization.PrivateFormat.OpenSSH)
    return key.public_key().public_bytes(OPENSSH, serialization.PublicFormat.OpenSSH).decode()


def make_key_check(public_keys: Iterable[str]) -> Callable[[str], bool]:
    """A function that tells whether a PEM public key is one of these OpenSSH keys."""

    def to_pem(line: str) -> str:
        key = serialization.load_ssh_public_key(line.encode())
        return key.public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo).decode().strip()

    known = {to_pem(line) for line in public_keys}
    return lambda pem: pem.strip() in known


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _generate_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey, kind: serialization.PrivateFormat) -> None:
    """Write a private key; the file has mode 0600 before the key is written."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(PEM, kind, serialization.NoEncryption()))


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _certificate_builder(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: int, is_ca: bool
) -> x509.CertificateBuilder:
    now = _now()
    builder = x509.CertificateBuilder(CA_NAME, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - DAY).not_valid_after(now + days * DAY)
    limits = x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None)
    usage = x509.KeyUsage(digital_signature=not is_ca, key_cert_sign=is_ca, crl_sign=is_ca, **DISABLED_KEY_USAGES)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = builder.add_extension(limits, critical=True).add_extension(usage, critical=True)
    return builder.add_extension(identifier, critical=False)
