"""MPI's side of bench_pcie_allreduce.py: ranks under mpiexec that sum when they are told to.

Between turns they sleep in a socket, since an MPI rank that waits in MPI polls. Nothing of this
package or of torch is imported here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path


def missing() -> str | None:
    """Why MPI cannot be timed here, or None."""
    for module in ("mpi4py", "numpy"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed (pip install mpi4py mpich)"
    return None if mpiexec() else "no mpiexec (pip install mpich)"


def mpiexec() -> str | None:
    """The one that came with MPICH's wheel, which the launching shell need not have in its path."""
    for folder in (Path(sys.executable).parent, *map(Path, sys.path)):
        # A wheel in another environment, reached by PYTHONPATH: lib/pythonX.Y/site-packages.
        for place in (folder, folder.parent.parent.parent / "bin"):
            if (place / "mpiexec").exists():
                return str(place / "mpiexec")
    return shutil.which("mpiexec")


class MPIRanks:
    """``num_ranks`` processes under mpiexec; ``turn`` times sums among them.

    RuntimeError, saying why, if they do not come.
    """

    def __init__(self, num_ranks: int):
        library = Path(mpiexec()).resolve().parent.parent / "lib/libmpi.so.12"
        environment = dict(os.environ)
        if library.exists():
            environment["MPI4PY_LIBMPI"] = str(library)
        with socket.create_server(("127.0.0.1", 0), backlog=num_ranks) as server:
            port = str(server.getsockname()[1])
            command = [mpiexec(), "-n", str(num_ranks), sys.executable, __file__, port]
            self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
            streams = [self._accept(server) for _ in range(num_ranks)]
        self._streams = {json.loads(s.readline())["rank"]: s for s in streams}
        self.library = json.loads(self._streams[0].readline())["library"]

    def _accept(self, server: socket.socket, seconds: int = 60):
        server.settimeout(1)
        for _ in range(seconds):
            try:
                return server.accept()[0].makefile("rw")
            except TimeoutError:
                if self._process.poll() is not None:
                    raise RuntimeError(f"mpiexec ended with {self._process.returncode}") from None
        self._process.kill()
        raise RuntimeError(f"no ranks of mpiexec after {seconds} s")

    def turn(self, num_bytes: int, num_calls: int) -> list[float]:
        """Microseconds of single calls on rank 0, after one that is not timed."""
        for stream in self._streams.values():
            stream.write(json.dumps([num_bytes, num_calls]) + "\n")
            stream.flush()
        return json.loads(self._streams[0].readline())

    def __enter__(self) -> MPIRanks:
        return self

    def __exit__(self, *error) -> None:
        for stream in self._streams.values():
            stream.close()
        self._process.wait(30)


def main(port: int) -> None:
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with socket.create_connection(("127.0.0.1", port)) as connection:
        stream = connection.makefile("rw")

        def say(what) -> None:
            stream.write(json.dumps(what) + "\n")
            stream.flush()

        say({"rank": world.rank})
        if world.rank == 0:
            version = MPI.Get_library_version().split("\n")[0].split()[-1]
            mpi4py = importlib.metadata.version("mpi4py")
            say({"library": f"MPICH {version}, mpi4py {mpi4py}"})
        for line in stream:
            num_bytes, num_calls = json.loads(line)
            mine = np.full(num_bytes // 4, world.rank + 1, dtype=np.float32)
            total = np.empty_like(mine)
            world.Allreduce(mine, total)
            assert (total == world.size * (world.size + 1) / 2).all()
            times = []
            for _ in range(num_calls):
                start = time.perf_counter()
                world.Allreduce(mine, total)
                times.append((time.perf_counter() - start) * 1e6)
            if world.rank == 0:
                say(times)


if __name__ == "__main__":
    main(int(sys.argv[1]))
