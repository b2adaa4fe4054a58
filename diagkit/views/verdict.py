"""One story in two sentences: what happened, where and when; and what came of it.

The rules: a split that heals inside the phase in which it arose, before anything failed on it, is no fault and is not
told as one; a sentence says only what the trace holds, never what would happen next (that is diagnosis).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diagkit.trace.schema import EXIT, PARAMETER, EngineFacts, Failure, GroupFacts, device_type
from diagkit.trace.table import rank_of
from diagkit.views.scene import clean
from diagkit.views.story import Column, Story

__all__ = ["Run", "Verdict", "context", "judge", "short_call", "split_runs"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``title`` answers where and when, ``sentence`` says what came of it, ``short`` is a title for narrow places.

    ``good``: nothing is wrong. ``failed``: an operation failed; a split that nothing has met is neither.
    """

    title: str
    sentence: str
    short: str
    good: bool
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Some tensors were split from ``columns[start]`` to ``columns[end]``; ``lasting`` says whether that is a fault."""

    start: int
    end: int
    lasting: bool


def split_runs(columns: Sequence[Column]) -> list[Run]:
    """The stretches of moments at which something was split."""
    runs: list[Run] = []
    start: int | None = None
    for i, column in enumerate((*columns, None)):
        if column is not None and column.splits and start is None:
            start = i
        elif start is not None and (column is None or not column.splits):
            inside = columns[start:i]
            arose = inside[0].phase.ordinal
            ended = any(c.moment.kind == EXIT and c.phase.ordinal == arose for c in inside)
            runs.append(Run(start, i - 1, column is None or ended or any(c.failed for c in inside)))
            start = None
    return runs


def judge(story: Story) -> Verdict:
    """The verdict on a story."""
    columns = story.every
    failure = next((c for c in columns if c.moment.failure), None)
    runs = split_runs(columns)
    lasting = next((run for run in runs if run.lasting), None)
    raised = _raised(failure.moment.failure) if failure and failure.moment.failure else ""
    if lasting is not None:
        return _split(story, lasting, raised)
    if failure is not None:
        where = failure.phase.name or "the run"
        short = f"{where} fails, with metadata and bytes together"
        title = f"{_capital(where)} fails while metadata and bytes of {_all(story)} agree"
        return Verdict(title, raised, short, False, True)
    title, short = _healthy(story)
    sentence = "No split and no failure."
    if runs:
        where = _listed(list(dict.fromkeys(clean(columns[run.start].phase.name) or "a block" for run in runs)))
        sentence = f"A split inside {where} lasted for a moment and healed before it ended: no fault."
    return Verdict(title, sentence, short, True)


def context(story: Story) -> str:
    """The circumstances: ``"VeOmniEngine · CPUOffloadPolicy(pin_memory=True) · torch 2.13.0 · simulated npu · rank 0
    (of 0..1)"``.
    """
    rank, words = story.rank, []
    engine = next((facts.type for facts in rank.facts if isinstance(facts, EngineFacts) and facts.type), "")
    experiment = str(rank.header.job.get("experiment", ""))
    words.append(experiment or engine or str(rank.header.job.get("engine", "")))
    revision = str(rank.header.job.get("revision", ""))
    if revision and not experiment:
        words.append(f"revision {revision}")
    group = next((facts for facts in rank.facts if isinstance(facts, GroupFacts) and facts.offload), None)
    if group is not None:
        words.append(f"{group.policy or 'CPUOffloadPolicy'}(pin_memory={group.pin_memory})")
    if rank.header.torch:
        words.append(f"torch {rank.header.torch}")
    words.append(f"simulated {rank.header.device}" if rank.header.simulated else rank.header.device)
    words.append(rank_of(rank.rank, rank.header.world_size))
    return clean(" · ".join(word for word in words if word))


def _split(story: Story, run: Run, raised: str) -> Verdict:
    columns = story.every
    worst = max(columns[run.start : run.end + 1], key=lambda column: column.splits)
    first = columns[run.start]
    phase = clean(first.phase.name) or "the run"
    call = clean(first.moment.label if first.moment.cause is None else _call(first))
    noun = _noun(story)
    many = _all(story) if worst.splits == _number(story) else f"{worst.splits:,} {noun}"
    pair = next((c for history in story.histories for c in (story.cells[n] for n in history) if c and c.split), None)
    places = f": metadata says {pair.metadata}, the bytes are on {pair.storage}" if pair else ""
    return Verdict(
        f"In {phase}, {call} splits {many}{places}",
        f"Then {raised}" if raised else _unmet(columns, run),
        f"{phase} splits {many}",
        False,
        bool(raised),
    )


def _unmet(columns: Sequence[Column], run: Run) -> str:
    """What became of a split on which nothing has failed."""
    if run.end + 1 == len(columns):
        return "No operation has failed on them in this trace."
    mended = columns[run.end + 1]
    by = clean(mended.moment.label) if mended.moment.cause is None else _call(mended)
    where = f" in {clean(mended.phase.name)}" if mended.phase.name else ""
    return f"No operation has failed on them in this trace; {by}{where} mended them."


def _healthy(story: Story) -> tuple[str, str]:
    path: list[str] = []
    pinned = True
    for c in range(len(story.columns)):
        cells = [
            cell
            for tensor, cell in zip(story.tensors, story.at(c), strict=True)
            if cell is not None and (tensor[0] == PARAMETER or not _parameters(story))
        ]
        places = sorted({device_type(cell.storage) or "?" for cell in cells})
        if places == ["meta"] and not path:
            continue  # nothing has bytes yet: that is no place to have moved from
        pinned = pinned and all(cell.pinned for cell in cells)
        if places and path[-1:] != [" and ".join(places)]:
            path.append(" and ".join(places))
    names = list(dict.fromkeys(clean(c.phase.name) for c in story.every if c.phase.name))
    through = f" through {_listed(names)}" if 0 < len(names) <= 5 else ""
    if len(path) <= 1:
        place = f"on {path[0] if path else 'no device'}{', pinned' if pinned and path else ''}"
        comma = "," if pinned and through else ""
        stay = f"{_all(story)} {'stays' if _number(story) == 1 else 'stay'}"
        return f"{stay if story.subject else _capital(stay)} {place}{comma}{through}", f"{stay} {place}"
    journey = " → ".join(path[:5]) + (" → …" if len(path) > 5 else "")
    of = _all(story)
    return f"Metadata and bytes of {of} move together{through}: {journey}", f"{of} in one piece: {journey}"


def _call(column: Column) -> str:
    """The torch call that a reader knows: ``Module.to`` rather than the ``Module._apply`` beneath it."""
    cause = column.moment.cause
    public = [word for word in (cause.chain if cause else ()) if word.startswith("Module.") and "._" not in word]
    return public[-1] if public else (cause.operation if cause else column.moment.label)


def _raised(failure: Failure) -> str:
    message = _first_sentence(clean(failure.message))
    return f"{short_call(failure.operation) or 'it'} raises {clean(failure.type)}{': ' if message else ''}{message}"


def _first_sentence(text: str) -> str:
    end = text.find(". ")
    return text if end < 0 else text[: end + 1]


def short_call(operation: str) -> str:
    """``"Module.state_dict"`` -> ``"state_dict"``: the name under which it is called."""
    return clean(operation).rpartition(".")[2]


def _parameters(story: Story) -> int:
    return sum(kind == PARAMETER for kind, *_ in story.tensors)


def _number(story: Story) -> int:
    return _parameters(story) or len(story.tensors)


def _noun(story: Story) -> str:
    noun = "parameter" if _parameters(story) else "tensor"
    return noun if _number(story) == 1 else f"{noun}s"


def _all(story: Story) -> str:
    """``"1 parameter"``, ``"both parameters"``, ``"all 21 parameters"``; or the one that the story is about."""
    if story.subject:
        return story.subject
    number = _number(story)
    return f"both {_noun(story)}" if number == 2 else f"{'all ' if number > 2 else ''}{number:,} {_noun(story)}"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
