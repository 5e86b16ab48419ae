"""Finds addresses, ports and network interfaces of this machine."""

from __future__ import annotations

import errno
import socket

from meshwright.errors import PlanError

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def check_port(port: int) -> None:
    """Raise if a port of this machine is not free; the check listens on the port briefly, on all addresses.

    Raises:
        PlanError: if the port is in use, or this user may not open it.
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
    """Return this machine's own address on the route to another address; nothing is sent.

    Raises:
        PlanError: if the name does not resolve, or there is no route to the address.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PlanError(f"--main_process_ip {address}: {error.strerror or error}; no route leads there") from None


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an address; None if there is none."""
    import psutil  # accelerate depends on it

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in entries):
            return str(name)
    return None
