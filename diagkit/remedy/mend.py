"""One kind of thing that is to be mended: what there is to do, and which hazards it is the answer to.

Whoever looks for it touches nothing; its acts are called when the ranks have agreed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diagkit.remedy.look import Look

#: What each kind of mend is the answer to.
ANSWERS: dict[str, tuple[str, ...]] = {
    "pass": ("DK604",),
    "parameters": ("DK101", "DK102", "DK103a", "DK103b", "DK201", "DK701"),
    "gradients": ("DK301",),
    "optimizer state": ("DK302", "DK303"),
    "buffers": ("DK501",),
    "lazy init": ("DK601",),
}

Act = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Mend:
    """One kind of thing to be done: acts by name. ``names`` tells what is concerned, where that goes by other names."""

    kind: str
    subject: str  # "{n} parameter{s}" where the acts are counted, else a whole one: "a forward pass that ..."
    outcome: str  # "on the CPU again; ..."
    acts: tuple[tuple[str, Act], ...]
    codes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def concerned(self) -> tuple[str, ...]:
        """Tensors or groups."""
        return self.names or tuple(name for name, _ in self.acts)

    def told(self, failed: int = 0) -> str:
        """Subject and outcome, of which ``failed`` acts came to nothing.

        >>> Mend("buffers", "{n} buffer{s}", "on the accelerator again", (("scale", print), ("bias", print))).told(1)
        '1 of 2 buffers: on the accelerator again'
        """
        whole, done = len(self.acts), len(self.acts) - failed
        n = str(whole) if done in (0, whole) else f"{done} of {whole}"
        subject = self.subject.format(n=n, s="s" * (whole != 1))
        return f"{subject}: {self.outcome if done else 'not mended'}"


def answers(look: Look, kind: str) -> tuple[str, ...]:
    """The codes that were found of those which this kind of mend is the answer to."""
    return tuple(code for code in ANSWERS[kind] if code in look.codes)


def count(things: Sequence[object], word: str) -> str:
    """``"3 buffers"``.

    >>> count(["scale"], "buffer")
    '1 buffer'
    """
    return f"{len(things)} {word}{'s' * (len(things) != 1)}"
