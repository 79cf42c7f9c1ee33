"""A PostgreSQL server of the tests' own, which can be stopped and started again."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class PostgresServer:
    """One server on a loopback port; `address` is a URL without the driver."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self._folder, self._programs = folder, programs
        # PostgreSQL refuses to run as root.
        self._user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        if self._user:
            shutil.chown(folder, "postgres")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port: int = free.getsockname()[1]
        self.address = f"tuner@127.0.0.1:{self._port}"
        made = ("-A", "trust", "-U", "tuner", "-E", "UTF8", "--locale=C", "--no-sync")
        self._run("initdb", *made)

    def _run(self, program: str, *arguments: str) -> None:
        named = [str(self._programs / program), "-D", str(self._folder / "data"), *arguments]
        done = subprocess.run(
            [*self._user, *named],
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> None:
        """Start, and wait until it answers."""
        settings = f"-c listen_addresses=127.0.0.1 -p {self._port} -k {self._folder}"
        log = str(self._folder / "log")
        self._run("pg_ctl", "-o", f"{settings} -c fsync=off", "-l", log, "-w", "start")

    def stop(self) -> None:
        """Stop at once, as at a power loss, where it runs; connections are cut."""
        if (self._folder / "data" / "postmaster.pid").exists():
            self._run("pg_ctl", "-m", "immediate", "-w", "stop")


@contextmanager
def postgres() -> Iterator[PostgresServer]:
    """Run a server until the block ends; skip where none is installed."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        pytest.skip("no PostgreSQL here: apt-get install postgresql")
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("no psycopg here: pip install 'psycopg[binary]'")
    folder = Path(tempfile.mkdtemp(prefix="tune-postgres-"))
    try:
        server = PostgresServer(folder, programs[-1])
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)
