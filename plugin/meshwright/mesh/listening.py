"""The address on which rank 0 listens: only the one by which the other ranks reach it."""

from __future__ import annotations

import contextlib
import os
import socket

import torch.distributed as dist

LOOPBACK = "127.0.0.1"


def listening_address() -> str:
    """Return the address of the interface that connects this process with the other ranks.

    This is loopback if the launcher says that all ranks are on this host. Otherwise it is the address of MASTER_ADDR,
    or, if that is not an address of this host (a service of a cluster, for example), the one from which this host
    reaches it. "0.0.0.0" stands for all interfaces, if MASTER_ADDR only leads to loopback or cannot be resolved.
    """
    wanted = os.environ.get("MASTER_ADDR", LOOPBACK)
    ranks = str(dist.get_world_size()) if dist.is_initialized() else os.environ.get("WORLD_SIZE")
    if ranks is not None and os.environ.get("LOCAL_WORLD_SIZE") == ranks:
        return LOOPBACK
    if wanted in ("localhost", "::1") or wanted.startswith("127."):
        return LOOPBACK
    with contextlib.suppress(OSError):
        for family, _, _, _, place in socket.getaddrinfo(wanted, 1, type=socket.SOCK_DGRAM):
            # Connecting a datagram socket sends nothing; it only chooses the interface.
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(place)
                own = str(probe.getsockname()[0])
                # Many hosts give their own name a loopback address, which other hosts cannot reach.
                if not own.startswith("127.") and own != "::1":
                    return own
    return "::" if ":" in wanted else "0.0.0.0"


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on one address.

    Raises:
        OSError: the address is not one of this host, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener
