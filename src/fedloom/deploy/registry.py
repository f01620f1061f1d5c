"""A fleet's folder at the server: its devices, their keys, and the largest tier each of them may train.

Copy `devices/NAME` to the device; it contains everything `fedloom deploy device` needs.
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import sync_folder, write_atomic
from ..flower.versions import VERSION
from ..recipe.errors import RecipeIssue, recipe_error
from ..recipe.load import LoadedRecipe

if TYPE_CHECKING:
    from .keys import Authority

REGISTRY_FILE, BUNDLE_FILE = "fleet.json", "device.json"
PROXY_LOG = "proxy.jsonl"
KEYGEN = "ssh-keygen -t ecdsa -b 384 -N '' -f key"  # OpenSSH's format, without a passphrase, as Flower reads it


@dataclass(frozen=True)
class EnrolledDevice:
    name: str
    max_tier: str | None  # the largest tier it may train; None: any that fits
    key: str  # public key as OpenSSH writes it; "": it has none, or it was revoked
    node: int | None = None  # Flower's node id, once the key is registered with the SuperLink


@dataclass(frozen=True)
class FleetRegistry:
    folder: Path
    server: str  # host:port under which devices reach it
    secure: bool
    devices: tuple[EnrolledDevice, ...] = ()
    valid_days: int | None = None  # of new server certificates; None: the default

    @property
    def host(self) -> str:
        return self.server.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.server.rpartition(":")[2])

    def index_of_node(self, node: int) -> int | None:
        """Index of the device registered under this Flower node id."""
        return next((index for index, device in enumerate(self.devices) if device.node == node), None)

    def with_nodes(self, nodes: Mapping[str, int]) -> "FleetRegistry":
        """With Flower's node ids, by device name."""
        devices = tuple(replace(device, node=nodes.get(device.name, device.node)) for device in self.devices)
        return replace(self, devices=devices)

    def check_size(self, loaded: LoadedRecipe) -> None:
        """Raise unless the recipe has as many devices as the fleet."""
        size, enrolled = loaded.recipe.data.devices, len(self.devices)
        if size != enrolled:
            message, hint = f"the recipe has {size} devices, the fleet {enrolled}", f"--set data.devices={enrolled}"
            raise loaded.error(RecipeIssue(("data", "devices"), "FLEET_SIZE", message, hint))

    def write(self) -> None:
        devices = [asdict(device) for device in self.devices]
        document = {"server": self.server, "secure": self.secure, "valid_days": self.valid_days, "devices": devices}
        write_atomic(self.folder / REGISTRY_FILE, (json.dumps(document, indent=1) + "\n").encode())
        sync_folder(self.folder)


def read_fleet_registry(folder: Path) -> FleetRegistry:
    try:
        document = json.loads((folder / REGISTRY_FILE).read_text("utf-8"))
        devices = tuple(EnrolledDevice(**device) for device in document["devices"])
        return FleetRegistry(folder, document["server"], document["secure"], devices, document.get("valid_days"))
    except OSError as error:
        hint = f"create one with: fedloom deploy keys {folder} --server HOST:PORT --device NAME"
        raise recipe_error(folder, "FLEET_MISSING", f"no {REGISTRY_FILE} in this folder", hint) from error
    except (ValueError, KeyError, TypeError) as error:
        raise recipe_error(folder, "FLEET_FORMAT", f"{REGISTRY_FILE} cannot be read: {error}") from error


@dataclass(frozen=True)
class EnrollRequest:
    """A device to enroll; `public_key` is a file if the device generated its own key pair."""

    name: str
    max_tier: str | None = None
    public_key: Path | None = None


def parse_enroll_request(text: str) -> EnrollRequest:
    """Parse NAME or NAME:TIER, either followed by =FILE with a public key."""
    front, _, file = text.partition("=")
    name, _, max_tier = front.partition(":")
    if not re.fullmatch(r"\w[\w.-]*", name):
        hint = "use letters, digits, '.', '_' or '-', not starting with '.' or '-'"
        raise recipe_error(text, "DEVICE_NAME", f"invalid device name {name!r}", hint)
    return EnrollRequest(name, max_tier or None, Path(file) if file else None)


def enroll(
    folder: Path, server: str | None, requests: Iterable[EnrollRequest], secure: bool, valid_days: int | None = None
) -> FleetRegistry:
    """Create a fleet, or add devices to it.

    Keys and certificates are kept; a new address gets a new server certificate. `secure` applies only to a new fleet,
    `valid_days` to certificates that are made from now on.
    """
    from .keys import is_loopback

    exists = (folder / REGISTRY_FILE).exists()
    registry = read_fleet_registry(folder) if exists else FleetRegistry(folder, "", secure)
    new_address = server is not None and server != registry.server
    registry = replace(registry, server=server or registry.server, valid_days=valid_days or registry.valid_days)
    if not re.fullmatch(r"[^\s:/]+:\d{1,5}", registry.server):
        hint = "--server is the address under which devices reach the server"
        raise recipe_error(folder, "ADDRESS", f"{registry.server!r} is not HOST:PORT", hint)
    if not registry.secure and not is_loopback(registry.host):
        message = f"without TLS and keys anyone could take part, and {registry.host} is not a loopback address"
        raise recipe_error(folder, "INSECURE", message, "leave --insecure out")
    folder.mkdir(parents=True, exist_ok=True)
    if registry.secure and new_address:
        authority_of(registry).certify(registry.host)
    names = {device.name for device in registry.devices}
    for request in requests:
        if request.name in names:
            raise recipe_error(folder, "DEVICE_NAME", f"there already is a device {request.name}")
        names.add(request.name)
        registry = replace(registry, devices=(*registry.devices, _enroll_device(registry, request)))
    registry.write()
    for index in range(len(registry.devices)):
        _write_bundle(registry, index)
    return registry


def authority_of(registry: FleetRegistry) -> "Authority":
    """The fleet's certificate authority."""
    from .keys import VALID_DAYS, Authority

    return Authority(registry.folder, registry.valid_days or VALID_DAYS)


def renew(registry: FleetRegistry, valid_days: int | None = None, authority: bool = False) -> FleetRegistry:
    """Write a new server certificate, and a new one of the authority if asked for or if it would end earlier.

    Devices stay enrolled: their keys and the authority's key do not change.
    """
    if not registry.secure:
        raise recipe_error(
            registry.folder, "INSECURE", "this fleet has no certificates: it was created with --insecure"
        )
    registry = replace(registry, valid_days=valid_days or registry.valid_days)
    if authority:
        authority_of(registry).renew()
    authority_of(registry).certify(registry.host)
    registry.write()
    for index in range(len(registry.devices)):
        _write_bundle(registry, index)
    return registry


def revoke(registry: FleetRegistry, names: Iterable[str]) -> FleetRegistry:
    """Forget these devices' public keys: the server rejects them from its next start on. Index and name stay taken."""
    for name in names:
        if name not in {device.name for device in registry.devices}:
            raise recipe_error(registry.folder, "DEVICE_NAME", f"there is no device {name}")
        devices = tuple(replace(device, key="") if device.name == name else device for device in registry.devices)
        registry = replace(registry, devices=devices)
    registry.write()
    return registry


def _enroll_device(registry: FleetRegistry, request: EnrollRequest) -> EnrolledDevice:
    folder = registry.folder / "devices" / request.name
    folder.mkdir(parents=True, exist_ok=True)
    if not registry.secure:
        return EnrolledDevice(request.name, request.max_tier, "")
    if request.public_key is None:
        from .keys import create_device_key

        return EnrolledDevice(request.name, request.max_tier, create_device_key(folder / "key"))
    words = request.public_key.read_text("utf-8").split()
    if len(words) < 2 or not words[0].startswith("ecdsa-sha2-"):
        message = f"{request.public_key} is not an ECDSA public key in OpenSSH format"
        raise recipe_error(registry.folder, "KEY", message, f"create one with: {KEYGEN}")
    return EnrolledDevice(request.name, request.max_tier, " ".join(words[:2]))


@dataclass(frozen=True)
class DeviceBundle:
    """Contents of device.json."""

    folder: Path
    name: str
    index: int
    server: str
    secure: bool
    fedloom: str = ""  # version of the server when the device was enrolled


def _write_bundle(registry: FleetRegistry, index: int) -> None:
    device = registry.devices[index]
    folder = registry.folder / "devices" / device.name
    document = {
        "name": device.name, "index": index, "server": registry.server, "secure": registry.secure, "fedloom": VERSION,
    }  # fmt: skip
    write_atomic(folder / BUNDLE_FILE, (json.dumps(document, indent=1) + "\n").encode())
    if registry.secure:
        shutil.copyfile(registry.folder / "ca.crt", folder / "ca.crt")


def read_bundle(folder: Path) -> DeviceBundle:
    try:
        document: dict[str, Any] = json.loads((folder / BUNDLE_FILE).read_text("utf-8"))
        known = {name: document[name] for name in ("name", "index", "server", "secure")}
        return DeviceBundle(folder, **known, fedloom=str(document.get("fedloom", "")))
    except (OSError, ValueError, KeyError) as error:
        hint = "copy devices/NAME from the fleet's folder, which fedloom deploy keys writes"
        raise recipe_error(folder, "BUNDLE", f"this is not a device's folder: {error}", hint) from error
