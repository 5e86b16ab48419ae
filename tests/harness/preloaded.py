"""Programs that a shell starts from PATH, forked from a server that has the imports done: a second each, not ten.

``commands`` writes stand-ins for ``python``, ``torchrun`` and others into a folder. Each hands its arguments,
environment, working directory, open files, signals and namespaces to the server, which runs what the real program would
run, and ends with the exit code of that, or by the same signal. To the program the stand-in is ``sys.executable``, so
that processes which it starts have the imports done, too. Its process and parent are other ones than the stand-in's.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing
import multiprocessing.process
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn

from harness.server import fork_context

CLIENT = """#!{python} -ISE
import json, os, signal, socket, sys
if sys.argv[1:2] == ["-I"]:  # without anything that is installed, so there is nothing to have imported
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
def is_handed_on(descriptor):
    try:
        return os.get_inheritable(descriptor)
    except OSError:  # that of the list
        return False
numbers = sorted(filter(is_handed_on, map(int, os.listdir("/dev/fd"))))
spaces = [f"/proc/self/ns/{{kind}}" for kind in ("net", "uts") if os.path.exists("/proc/self/ns")]
call = {{"arguments": {before!r} + sys.argv[1:], "cwd": os.getcwd(), "environment": dict(os.environ),
        "mask": list(mask), "numbers": numbers}}
text = json.dumps(call).encode()
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
spaces = [os.open(space, os.O_RDONLY) for space in spaces]
socket.send_fds(connection, [len(text).to_bytes(8, "big")], numbers + spaces)
connection.sendall(text)
def hand_on(number, frame):
    try:
        connection.send(bytes([number]))
    except OSError:  # the program has ended
        pass
for number in signal.valid_signals() - {{signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}}:
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, hand_on)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
code = int(connection.recv(8) or 1)
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
# What each command is to Python.
COMMANDS = {
    "python": [],
    "torchrun": ["-m", "torch.distributed.run"],
    "meshwright": ["-m", "meshwright_tools.cli"],
    "accelerate": ["-m", "accelerate.commands.accelerate_cli"],
    "pytest": ["-m", "pytest", "--collect-only", "-q"],
}
MOST_DESCRIPTORS = 64  # that a program inherits


@contextlib.contextmanager
def commands(folder: Path, parsed_only: Iterable[str], added: Mapping[str, list[str]]) -> Iterator[None]:
    """Write the stand-ins into a folder, and serve them.

    Args:
        folder: where the commands lie; the caller puts it on PATH. Its path must be short, for a socket is in it.
        parsed_only: words; a command line with one of them is read by the program's own parser and not carried out.
        added: words; a command line with one of them gets these arguments too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    address = str(folder / "socket")
    for name, before in COMMANDS.items():
        path = folder / name
        path.write_text(CLIENT.format(python=sys.executable, address=address, before=before))
        path.chmod(0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    context = fork_context()
    python = str(folder / "python")
    server = context.Process(target=_serve, args=(listener, _address(), python, tuple(parsed_only), dict(added)))
    server.start()
    listener.close()
    try:
        yield
    finally:
        server.kill()
        server.join()


def _address() -> str:
    """Return where the server of the whole session listens, so that programs with processes of their own use it too."""
    forkserver.ensure_running()
    return forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]


def _serve(
    listener: socket.socket, address: str, python: str, parsed_only: tuple[str, ...], added: dict[str, list[str]]
) -> None:
    """Fork a process for each call, which waits for another one that runs the program."""
    for module in ("torch.distributed.run", "accelerate.commands.accelerate_cli", "meshwright_tools.calibration"):
        importlib.import_module(module)
    gc.freeze()  # in the programs, too: a collection there would copy each page that they share with this process
    forkserver._forkserver._forkserver_address = address  # type: ignore[attr-defined]
    # The bound method and the module's name for it: a program that starts a server by either would import all anew.
    forkserver._forkserver.ensure_running = forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    sys.executable = python
    multiprocessing.set_executable(python)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _answer(connection, parsed_only, added)
        connection.close()


def _answer(connection: socket.socket, parsed_only: tuple[str, ...], added: dict[str, list[str]]) -> NoReturn:
    size, descriptors, flags, _ = socket.recv_fds(connection, 8, MOST_DESCRIPTORS)
    assert not flags & socket.MSG_CTRUNC, "more open files than MOST_DESCRIPTORS"
    call = json.loads(connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
    call["arguments"] += [text for word in added.keys() & set(call["arguments"]) for text in added[word]]
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # until the program has the mask that it inherits
    if (program := os.fork()) == 0:
        connection.close()
        _inherit(call["numbers"], descriptors)
        _run(call, parsed_only)
    for descriptor in descriptors:
        os.close(descriptor)
    heard = select.poll()
    heard.register(connection, select.POLLIN)
    while True:
        ended, status = os.waitpid(program, os.WNOHANG)
        if ended:
            with contextlib.suppress(OSError):
                connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)
        if heard.poll(20):
            numbers = connection.recv(64)
            for number in numbers or [signal.SIGKILL]:  # none if the stand-in was killed
                os.kill(program, number)
            if not numbers:
                heard.unregister(connection)


def _inherit(numbers: list[int], descriptors: list[int]) -> None:
    """Take over open files under the numbers that they had, and the namespaces that the last descriptors are of."""
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for number, descriptor in zip(numbers, moved, strict=False):
        os.dup2(descriptor, number)
    for kind, descriptor in zip(("net", "uts"), moved[len(numbers) :], strict=False):
        is_ours = os.path.samestat(os.fstat(descriptor), os.stat(f"/proc/self/ns/{kind}"))
        if not is_ours and ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"the {kind} namespace could not be entered")
    for descriptor in moved:
        os.close(descriptor)


def _run(call: dict[str, Any], parsed_only: tuple[str, ...]) -> NoReturn:
    """As Python would, from the command line to the exit code."""
    signal.pthread_sigmask(signal.SIG_SETMASK, call["mask"])
    os.chdir(call["cwd"])
    multiprocessing.process.ORIGINAL_DIR = call["cwd"]  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)  # the platform's, not the server's
    multiprocessing.current_process().name = "MainProcess"
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(call["environment"])
    sys.stdin, sys.stdout, sys.stderr = (  # type: ignore[misc]
        open(number, mode, buffering=1, closefd=False)  # noqa: SIM115
        for number, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # of what the server has imported, such as a quarter second for torch's operators
    code = 0
    try:
        _start(call["arguments"], parsed_only)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        code = 1
        try:
            sys.excepthook(*sys.exc_info())
        except BaseException:
            traceback.print_exc()
    for finish in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
        with contextlib.suppress(BaseException):
            finish()
    os._exit(code)


def _start(arguments: list[str], parsed_only: tuple[str, ...]) -> None:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if set(parsed_only) & set(arguments):
        _parse_only()
    while arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):  # options of the interpreter
        arguments = arguments[2 if arguments[0] in ("-W", "-X") else 1 :]
    if arguments[0] == "-c":
        sys.argv, sys.path[0:0] = ["-c", *arguments[2:]], [os.getcwd()]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv, sys.path[0:0] = arguments[1:], [os.getcwd()]
        warnings.filterwarnings("ignore", ".*found in sys.modules after import.*", RuntimeWarning)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0:0] = arguments, [str(Path(arguments[0]).resolve().parent)]
        runpy.run_path(arguments[0], run_name="__main__")


def _parse_only() -> None:
    """Let argparse and typer read the command line, and end where the program would begin."""
    from argparse import ArgumentParser

    from typer.core import TyperCommand

    def parsed(*_: Any) -> NoReturn:
        print("the command line is right")
        raise SystemExit(0)

    read = ArgumentParser.parse_args
    ArgumentParser.parse_args = lambda *args, **kwargs: parsed(read(*args, **kwargs))  # type: ignore[method-assign]
    TyperCommand.invoke = parsed  # type: ignore[method-assign]
