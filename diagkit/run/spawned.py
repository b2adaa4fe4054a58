"""Records the processes that a recorded script starts by ``spawn``, as ``torch.multiprocessing.spawn`` does.

Such a child is told the path of its parent's script and runs that as ``__mp_main__``. Here it is told this file's path
instead, which begins to watch and then runs the script in its place.
"""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diagkit.run.options import Options

_VARIABLE = "DIAGKIT_SPAWNED"


class SpawnCover:
    """Covers the one function of Python's that tells a child how to begin."""

    def __init__(self, script: str, options: Options, simulated: bool) -> None:
        self._script = script
        self._told = json.dumps({"script": script, "simulated": simulated, "options": dataclasses.asdict(options)})
        self._out = Path(options.out or "runs")
        self._since = time.time()
        self._before: Callable[..., Any] | None = None
        self._cover: Callable[..., Any] | None = None
        self.used = False

    def arrived(self) -> None:
        """Covers it; Python's module is there."""
        import multiprocessing.spawn as spawn

        before = spawn.get_preparation_data

        def get_preparation_data(name: str) -> Any:
            data = before(name)
            if self._cover is not None and data.get("init_main_from_path") == self._script:
                self.used = True
                os.environ[_VARIABLE] = self._told
                data["init_main_from_path"] = __file__
            return data

        self._before, self._cover = before, get_preparation_data
        spawn.get_preparation_data = get_preparation_data

    def leave(self) -> None:
        """Puts the identical function back where ours is on top."""
        spawn = sys.modules.get("multiprocessing.spawn")
        if self._cover is not None and getattr(spawn, "get_preparation_data", None) is self._cover:
            spawn.get_preparation_data = self._before  # type: ignore[union-attr]
        self._cover = None

    def folder(self) -> Path | None:
        """The folder in which the children left their trace, None where they left none."""
        if not self.used or not self._out.is_dir():
            return None
        # File systems keep times to a second or so.
        runs = [run for run in self._out.iterdir() if run.is_dir() and run.stat().st_mtime >= self._since - 1]
        return max(runs, key=lambda run: run.stat().st_mtime, default=None)


def _begin() -> dict[str, Any]:
    from multiprocessing.util import Finalize

    from diagkit.run.door import open_door
    from diagkit.run.options import Options

    told = json.loads(os.environ[_VARIABLE])
    if told["simulated"]:
        from diagkit.lab import simulate

        simulate()
    door = open_door(Options(**told["options"]))
    if door is not None:
        Finalize(None, door.close, exitpriority=10)  # such a process ends without Python's own way out
    return runpy.run_path(told["script"], run_name="__mp_main__")


if __name__ == "__mp_main__":
    globals().update(_begin())
