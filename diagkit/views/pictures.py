"""``python -m diagkit.views.pictures FOLDER``: draws the README's picture from a run made for it (make pictures)."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from diagkit.demo.experiments import Experiment, group_names
from diagkit.demo.launch import Launcher
from diagkit.trace import open_trace
from diagkit.views import before_after

NAME = "save-before-after.svg"


def draw(folder: Path, ranks: int = 2) -> Path:
    """Save with the FSDP engine before and after the fix, on the simulated accelerator, and draw both side by side.

    Returns the picture's path; its words are printed, so that whoever runs this can check the alternative text.
    """
    with tempfile.TemporaryDirectory(prefix="diagkit-") as scratch, Launcher(Path(scratch), ranks, "sim") as launcher:
        group = group_names(launcher.device)[0]
        runs = launcher.run([Experiment("fsdp", revision, "save", group=group) for revision in ("before", "#6604")])
        before, after = (open_trace(run.trace) for run in runs)
        figure = before_after(before, after, phase="save", names=("Before the fix", "With the guard"))
        print(figure.to_text())
    path = folder / NAME
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(figure.to_svg() + "\n")
    return path


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))
