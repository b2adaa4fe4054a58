"""The demo's results as text: the bug report told with one residency table a cell, and the matrix of all cells.

Rules of this module: plain text that reads the same in a terminal, a log and a pipe; what went wrong stands in
capitals, what is healthy stays quiet; every table says on which device it was measured, and whether that was simulated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from diagkit.demo.evidence import Residencies, summary
from diagkit.demo.experiments import FLAGS
from diagkit.demo.launch import CellResult
from diagkit.trace.schema import Residency

__all__ = ["device_line", "matrix_table", "residency_table", "story_text"]


def device_line(device: str, simulated: bool, ranks: int, torch: str) -> str:
    """``2 ranks on npu (SIMULATED in host memory; real FSDP2, real processes), torch 2.13.0``."""
    what = f"{device} (SIMULATED in host memory; FSDP2, processes and collectives are real)" if simulated else device
    return f"{ranks} {'rank' if ranks == 1 else 'ranks'} on {what}, torch {torch}"


def story_text(results: Sequence[CellResult]) -> str:
    """Each result of :func:`diagkit.demo.experiments.story` as a paragraph and rank 0's residency table."""
    return "\n\n".join(_chapter(result) for result in results)


def _chapter(result: CellResult) -> str:
    seen = result.evidence
    title = f"FSDP engine, {result.experiment.revision}: save_checkpoint() {_outcome_words(result)}"
    lines = [title, "-" * len(title)]
    if seen is not None:
        columns = [("before the move" if seen.moves else "at rest", seen.rest)]
        if seen.after_move is not None:
            columns.append(("after the move", seen.after_move))
        if seen.failure is not None:
            columns.append(("at failure", seen.failure))
        elif seen.end is not None:
            columns.append(("afterwards", seen.end))
        lines.append(residency_table(columns))
        if seen.first_cause:
            lines.append(f"What split them: {seen.first_cause}")
        if not seen.moves:
            lines.append("Nothing moved the model: FSDP owns its device, and the engine asks before it moves anything.")
    if result.message:
        kind = result.first.get("exception", {}).get("type")
        lines.append(f"{kind}: {result.message}" if kind else result.message)
    return "\n".join(lines)


def _outcome_words(result: CellResult) -> str:
    return "works" if result.outcome == "ok" else f"fails ({result.outcome})"


def residency_table(columns: Sequence[tuple[str, Residencies]]) -> str:
    """One line per pattern of names whose residencies agree, one column per moment: ``metadata / bytes``.

    Layer numbers become ``*`` and siblings are joined in braces, so that a model of any depth fits a screen.
    """
    grouped: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for key in columns[0][1]:
        states = tuple(_cell_text(at.get(key)) for _, at in columns)
        grouped.setdefault((re.sub(r"\.\d+\.", ".*.", key[1]), states), []).append(key[1])
    siblings: dict[tuple[str, str, tuple[str, ...]], list[tuple[str, int]]] = {}
    for (pattern, states), names in grouped.items():
        head, leaf, tail = _split_name(pattern)
        siblings.setdefault((head, tail, states), []).append((leaf, len(names)))
    table = [["", *(title for title, _ in columns)], ["parameter", *("metadata / bytes" for _ in columns)]]
    for (head, tail, states), leaves in siblings.items():
        joined = leaves[0][0] if len(leaves) == 1 else "{" + ",".join(leaf for leaf, _ in leaves) + "}"
        count = sum(number for _, number in leaves)
        table.append([f"{head}{joined}{tail}" + (f"  ×{count}" if count > 1 else ""), *states])
    return _aligned(table)


def _split_name(pattern: str) -> tuple[str, str, str]:
    """``model.layers.*.mlp.up_proj.weight`` -> ``("model.layers.*.mlp.", "up_proj", ".weight")``."""
    parts = pattern.split(".")
    if len(parts) < 2:
        return "", pattern, ""
    return ".".join(parts[:-2]) + ("." if len(parts) > 2 else ""), parts[-2], f".{parts[-1]}"


def _cell_text(facts: Residency | None) -> str:
    if facts is None:
        return "-"
    text = f"{facts.metadata_device} / {facts.storage_device or '?'}{' pinned' if facts.pinned else ''}"
    return f"{text}  SPLIT" if facts.split else text


def matrix_table(results: Iterable[CellResult]) -> str:
    """One line a cell, one block a process group; ``!`` marks what is not as expected."""
    blocks: dict[str, list[list[str]]] = {}
    for result in results:
        block = blocks.setdefault(result.experiment.group, [_HEAD])
        block.append(_line(result))
    return "\n\n".join(f"process group {group}\n{_aligned(rows)}" for group, rows in blocks.items())


_HEAD = ["engine", "revision", "operation", "outcome", "parameters at rest", "when it failed / ended", "what happened"]


def _line(result: CellResult) -> list[str]:
    cell, seen = result.experiment, result.evidence
    operation = cell.operation if cell.flags == "policy" else f"{cell.operation} ({_FLAG_WORDS[cell.flags]})"
    outcome = result.outcome if result.outcome == "ok" else result.outcome.upper()
    return [
        cell.engine,
        cell.revision + (f" without {', '.join(cell.without)}" if cell.without else ""),
        operation,
        outcome + ("" if not result.differences() else " !"),
        _parameters(None if seen is None else seen.rest),
        _parameters(None if seen is None else seen.failure or seen.end),
        _what_happened(result),
    ]


_FLAG_WORDS = {"both": "both flags", "manual": "no policy", "lora": "LoRA"}
assert _FLAG_WORDS.keys() | {"policy"} == FLAGS.keys()


def _parameters(at: Residencies | None) -> str:
    if not at:
        return "-"
    counts = summary(at)["parameters"]
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n}× {where}" for where, n in counts.items())


def _what_happened(result: CellResult) -> str:
    record = result.first
    if result.outcome != "ok":
        return _clipped(result.message, 48)
    words = []
    if record["exported"]:
        words.append(f"tensors on {record['exported']}")
    if record["values"]:
        words.append(f"values {record['values']}")
    if result.moves:
        words.append("moved by " + ", ".join(result.moves))
    return ", ".join(words)


def _clipped(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in rows)
