"""Two hosts on this machine: network namespaces with a cable between them, each with an address and a name."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Host:
    """One end of the cable.

    Args:
        name: of the host and of its namespace.
        address: of its interface.
        interface: its end of the cable.
    """

    name: str
    address: str
    interface: str

    def start(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a command on this host; what it prints goes to a file."""
        named = f'hostname {self.name} && exec "$@"'
        inside = ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", named, "sh", *command]
        with log.open("wb") as output:
            return subprocess.Popen(inside, stdout=output, stderr=subprocess.STDOUT, env=dict(env))

    def kill(self) -> None:
        """End everything that runs on it at once, as a crash of the machine's kernel would not even."""
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def cut_off(self) -> None:
        """Take its cable away: nothing that it sends arrives any more, not even that a connection has ended."""
        _ip("-n", self.name, "link", "set", self.interface, "down")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make the hosts; skip the test where that is not permitted."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("two hosts are network namespaces, which need root and the ip command")
    tag = os.getpid()
    hosts = tuple(Host(f"mw{tag}{end}", f"10.213.7.{index}", f"cable{end}") for index, end in enumerate("ab", 1))
    try:
        try:
            for host in hosts:
                _ip("netns", "add", host.name)
            first, second = hosts
            _ip("-n", first.name, "link", "add", first.interface, "type", "veth", "peer", "name", second.interface,
                "netns", second.name)  # fmt: skip
            for host in hosts:
                _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
                _ip("-n", host.name, "link", "set", "lo", "up")
                _ip("-n", host.name, "link", "set", host.interface, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield first, second
    finally:
        for host in hosts:
            with contextlib.suppress(subprocess.CalledProcessError):
                host.kill()
                _ip("netns", "delete", host.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
