"""What a rule is: a small question about one fact record, and a docstring that is the lesson about it.

The rules of rules:

* a rule sees facts only (`Subject`), never a tensor, and answers yes or no;
* it says nothing of when to ask: `judge` asks where the state is at rest, or where something failed with a text
that the
  rule explains (`says`);
* its docstring is the one source of what people read: `diagkit hazards CODE`, reports and findings all quote it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from diagkit.diagnosis.past import NOTHING, Past
from diagkit.diagnosis.seats import Seat
from diagkit.language import msg, tr
from diagkit.trace.schema import (
    EngineFacts,
    Facts,
    Failure,
    GroupFacts,
    OptimizerFacts,
    Residency,
    device_type,
)

#: From mild to grave, which is what `--fail-on` compares, and what each says.
MEANINGS = {
    "memory": msg("right results, more memory than need be"),
    "slow": msg("right results, slower than need be"),
    "later": msg("nothing has failed yet, and an operation will"),
    "silent": msg("wrong or lost results without an error"),
    "hang": msg("ranks may wait for each other for ever"),
    "now": msg("an operation has failed on it, or the next one will"),
}
SEVERITIES = tuple(MEANINGS)

HEADINGS = ("What happens", "How to see it", "Remedy", "Call", "Seen in", "Detected by", "Severity")
#: The parts of a lesson that are the same in every language: code, and numbers of public threads.
UNTRANSLATED = ("Call", "Seen in")


@dataclass(frozen=True, slots=True)
class World:
    """What is true around a row at one moment, on one rank."""

    accelerator: str | None = None  # device type; None on a machine without one
    groups: tuple[GroupFacts, ...] = ()
    mixed: frozenset[str] = frozenset()  # labels of models of whose groups some offload and some do not
    optimizers: tuple[OptimizerFacts, ...] = ()
    engines: tuple[EngineFacts, ...] = ()
    exports: frozenset[Residency] = frozenset()  # what is being handed out
    backends: str = ""
    failure: Failure | None = None
    said: frozenset[str] = frozenset()  # the names of the texts (`signatures`) that the failure's message holds
    resting: bool = True  # the state is at rest, or an operation is about to run on it
    about_to: str = ""  # the phase that begins just now, where one does
    live: bool = False  # a look at a live model: everything may be about to run

    def expects(self, *phases: str) -> bool:
        """Whether one of these phases is about to run, or may be."""
        return self.live or self.about_to in phases

    @property
    def hands_out_host_tensors(self) -> bool:
        """Whether an export is under way whose tensors are whole and on the CPU."""
        return any(device_type(f.storage_device) == "cpu" and f.wrapper != "DTensor" for f in self.exports)

    @property
    def offloads(self) -> bool:
        """Whether any FSDP group keeps its parameters on the CPU by policy."""
        return any(group.offload for group in self.groups)


@dataclass(frozen=True, slots=True)
class Subject:
    """One row as a rule sees it."""

    kind: str
    facts: Facts | Seat
    world: World
    part: str = ""
    group: GroupFacts | None = None  # the FSDP group that a parameter, or its gradient or state, belongs to
    owner: Residency | None = None  # the parameter that a gradient, state or export belongs to
    past: Past = NOTHING
    model: str = ""
    other: Facts | Seat | None = None  # of the same row on another rank, where ranks are held beside each other

    @property
    def tensor(self) -> Residency:
        """The facts of a tensor row."""
        if not isinstance(self.facts, Residency):
            raise TypeError(f"a rule for tensors was asked about {type(self.facts).__name__}")
        return self.facts

    @property
    def home(self) -> str | None:
        """Device type of the metadata."""
        return device_type(self.tensor.metadata_device)

    @property
    def bytes_at(self) -> str | None:
        """Device type of the bytes."""
        return device_type(self.tensor.storage_device)

    @property
    def computes_on(self) -> str | None:
        """Device type on which the parameter's group, or else the tensor's mesh, computes."""
        found = self.group.mesh_device if self.group else None
        if found is None and isinstance(self.facts, Residency):
            found = self.facts.mesh_device
        return found or self.world.accelerator

    @property
    def offloaded(self) -> bool:
        """The group's policy keeps this parameter on the CPU."""
        return self.group is not None and self.group.offload

    @property
    def policy_unknown(self) -> bool:
        """Nothing is known of the parameter's policy: no group was found, or it could not be read."""
        return self.group is None or self.group.unreadable is not None or self.group.policy in ("", "NoneType")

    @property
    def pins(self) -> bool:
        """The group's policy keeps this parameter in pinned CPU memory."""
        return self.group is not None and self.group.offload and self.group.pin_memory


Question = Callable[[Subject], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """A hazard: how it is recognised (``asks`` of each row of ``kinds``), and what there is to say about it.

    ``says`` names the error texts that it explains; ``follows`` the codes that it may merely follow from; ``rests`` is
    False for what is a fault only beside an operation that fails or is due.
    """

    code: str
    kinds: tuple[str, ...]
    asks: Question
    severity: str
    says: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()
    rests: bool = True
    family: str = ""
    english_title: str = ""
    english: dict[str, str] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.code)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rule) and other.code == self.code

    @property
    def title(self) -> str:
        """What is wrong, in the language chosen now."""
        return tr(self.english_title)

    @property
    def text(self) -> dict[str, str]:
        """The parts of the lesson by their (English) heading, in the language chosen now."""
        return {name: part if name in UNTRANSLATED else tr(part) for name, part in self.english.items()}

    @property
    def references(self) -> tuple[str, ...]:
        """Public threads in which it was met."""
        return tuple(part.strip() for part in self.english.get("Seen in", "").rstrip(".").split(";") if part.strip())

    @property
    def lesson(self) -> str:
        """The rule's docstring as the page that `diagkit hazards CODE` prints."""
        lines = [f"{self.code} · {self.title}", ""]
        for heading in HEADINGS:
            if heading in self.english:
                lines += [f"{tr(heading)}: {self.text[heading]}", ""]
        return "\n".join(lines).rstrip()


_RULES: dict[str, Rule] = {}


def rule(
    code: str,
    kinds: tuple[str, ...],
    severity: str,
    says: tuple[str, ...] = (),
    follows: tuple[str, ...] = (),
    rests: bool = True,
) -> Callable[[Question], Question]:
    """Enters a question into the catalogue under its code.

    Raises:
        ValueError: the code is taken, the severity unknown, or the docstring lacks a part of the lesson.
    """

    def enter(asks: Question) -> Question:
        title, text = _lesson(asks)
        if code in _RULES or severity not in SEVERITIES:
            raise ValueError(f"{code}: taken, or severity {severity!r} is not one of {', '.join(SEVERITIES)}")
        if missing := [heading for heading in HEADINGS if heading != "Call" and heading not in text]:
            raise ValueError(f"{code}: its docstring does not say: {', '.join(missing)}")
        family = asks.__module__.rpartition(".")[2]
        _RULES[code] = Rule(code, kinds, asks, severity, says, follows, rests, family, title, text)
        return asks

    return enter


def all_rules() -> tuple[Rule, ...]:
    """Every rule, by code."""
    import diagkit.diagnosis.rules  # noqa: F401  the families enter themselves

    return tuple(_RULES[code] for code in sorted(_RULES))


def find_rules(code: str) -> tuple[Rule, ...]:
    """The rules of a code; ``DK103`` finds ``DK103a`` and ``DK103b``. Empty where there is none."""
    wanted = code.strip().upper()
    return tuple(r for r in all_rules() if wanted in (r.code.upper(), r.code.rstrip("ab").upper()))


def _lesson(asks: Question) -> tuple[str, dict[str, str]]:
    lines = (inspect.getdoc(asks) or "").splitlines()
    if not lines:
        raise ValueError(f"{asks.__name__} has no docstring")
    text: dict[str, str] = {}
    heading = ""
    for line in _paragraphs(lines[1:]):
        name, colon, rest = line.partition(": ")
        if colon and name in HEADINGS:
            heading, text[name] = name, rest
        elif heading:
            text[heading] += "\n\n" + line
    return lines[0].rstrip("."), text


def _paragraphs(lines: list[str]) -> Iterator[str]:
    """Lines joined to paragraphs; a blank line or a heading begins a new one."""
    words: list[str] = []
    for line in [*lines, ""]:
        starts = not line.strip() or line.partition(": ")[0] in HEADINGS
        if starts and words:
            yield " ".join(words)
            words = []
        if line.strip():
            words.append(line.strip())
