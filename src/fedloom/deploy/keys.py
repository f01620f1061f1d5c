"""Who may speak with whom: a fleet's own authority, its server's certificate, and a key for every device."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec

LASTS = datetime.timedelta(days=3650)
LOOPBACK = ("localhost", "127.0.0.1")
ISSUER = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fedloom fleet")])


@dataclass(frozen=True)
class Authority:
    """The files of one; `ca.crt` alone ever leaves the folder."""

    folder: Path

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
        """A new certificate for the server, which devices reach at this host."""
        signer, key = self._signer(), _new_key()
        names = [_general(one) for one in dict.fromkeys((host, *LOOPBACK))]
        made = _draft(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host[:64])]), key, authority=False)
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        whose = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
        made = made.add_extension(whose, critical=False)
        self.server_certificate.write_bytes(made.sign(signer, hashes.SHA384()).public_bytes(form.Encoding.PEM))
        _write_private(self.server_key, key, form.PrivateFormat.PKCS8)

    def _signer(self) -> ec.EllipticCurvePrivateKey:
        """The authority's own key, made once."""
        secret = self.folder / "ca.key"
        if secret.exists():
            found = form.load_pem_private_key(secret.read_bytes(), None)
            assert isinstance(found, ec.EllipticCurvePrivateKey)  # we wrote it
            return found
        key = _new_key()
        made = _draft(ISSUER, key, authority=True).sign(key, hashes.SHA384())
        self.certificate.write_bytes(made.public_bytes(form.Encoding.PEM))
        _write_private(secret, key, form.PrivateFormat.PKCS8)
        return key


def new_device_key(path: Path) -> str:
    """A private key in this file; its public half as the one line that ssh writes."""
    key = _new_key()
    _write_private(path, key, form.PrivateFormat.OpenSSH)
    return key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH).decode()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey, kind: form.PrivateFormat) -> None:
    """Only its owner may read it, from the first byte on."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(form.Encoding.PEM, kind, form.NoEncryption()))


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _draft(subject: x509.Name, key: ec.EllipticCurvePrivateKey, authority: bool) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(ISSUER, subject, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + LASTS)
    limits = x509.BasicConstraints(ca=authority, path_length=0 if authority else None)
    uses = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    use = x509.KeyUsage(digital_signature=not authority, key_cert_sign=authority, crl_sign=authority, **uses)
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        made.add_extension(limits, critical=True).add_extension(use, critical=True).add_extension(own, critical=False)
    )
