"""Print constraints.txt anew from the environment this runs in:  .venv/bin/python .ci/pins.py > /tmp/new

Each pin carries the Python that its release asks for, so that an older Python, on which pip must choose an older
release, is not told to install what it cannot.
"""

import importlib.metadata
import re

HEAD = """\
# The versions that the tests run with. Every environment that make builds uses this file (pip install -c).
# A pin holds on the Pythons that its release supports; elsewhere pip chooses. Made by .ci/pins.py.
"""
# torch first, without the local part of its version (+cpu), which differs between the places it comes from.
FIRST = "torch"


def main() -> None:
    pins = {}
    for package in importlib.metadata.distributions():
        name, version = package.metadata["Name"], package.version.partition("+")[0]
        if name != "diagkit":
            pins[name] = f"{name}=={version}" + _marker(package.metadata.get("Requires-Python"))
    names = sorted(pins, key=lambda name: (name != FIRST, name.lower()))
    print(HEAD + "\n".join(pins[name] for name in names))


def _marker(requires: str | None) -> str:
    """``; python_full_version >= "3.11.5"`` for a release that asks for more than this project does."""
    floor = re.search(r">=?\s*([\d.]+)", requires or "")
    if floor is None or _numbers(floor[1]) <= (3, 10, 0):
        return ""
    return f'; python_full_version >= "{floor[1]}"'


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.strip(".").split("."))


if __name__ == "__main__":
    main()
