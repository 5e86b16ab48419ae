"""Addresses, ports and interfaces of this machine."""

from __future__ import annotations

import errno
import socket

from meshwright.errors import PlanError

LOOPBACK = "127.0.0.1"


def free_port(address: str = LOOPBACK) -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def check_port(port: int) -> None:
    """Listen on a port of this machine for a moment, on all its addresses.

    Raises:
        PlanError: naming the port.
    """
    try:
        with socket.create_server(("", port)):
            return
    except PermissionError:
        reason = "may not be opened by this user; take one above 1023"
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        reason = "is in use by another program; take another, the same on every machine"
    raise PlanError(f"--main_process_port {port} {reason}")


def local_address_towards(address: str) -> str:
    """This machine's own address on the way to another one; nothing is sent.

    Raises:
        PlanError: a name that does not resolve, or an address to which there is no way.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PlanError(f"--main_process_ip {address}: {error.strerror or error}; no way leads there") from None


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an address; None where none has."""
    import psutil  # accelerate brings it

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in entries):
            return str(name)
    return None
