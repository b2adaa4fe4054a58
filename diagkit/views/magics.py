"""Commands for a live notebook: ``%residency``, ``%%record``, ``%explain``, ``%guard``, ``%heal``, after ``%load_ext
diagkit``.

Where the kernels of an ipyparallel cluster are the ranks of a job, the same commands under ``%%px`` show one table for
all ranks, on rank 0. Nothing is loaded until a command is used, and unloading takes everything out again.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from diagkit.errors import DiagkitError, UsageError

if TYPE_CHECKING:
    from diagkit.remedy import Guard

_GUARDS: list[Guard] = []


def load(shell: Any) -> None:
    """Registers the commands in an IPython shell. A second time is harmless."""
    for name, command in _LINES.items():
        shell.register_magic_function(_told(shell, command), "line", name)
    shell.register_magic_function(_told(shell, _record), "cell", "record")


def unload(shell: Any) -> None:
    """Takes the commands out, and closes the guards of `%guard`."""
    _leave_guards()
    for name in _LINES:
        shell.magics_manager.magics["line"].pop(name, None)
    shell.magics_manager.magics["cell"].pop("record", None)


def _told(shell: Any, command: Callable[..., Any]) -> Callable[..., Any]:
    """The command, with an error of ours in one line."""

    def told(line: str, *cell: str) -> Any:
        from IPython.core.error import UsageError as OneLine

        try:
            return command(shell, line, *cell)
        except DiagkitError as error:
            raise OneLine(str(error)) from None

    told.__doc__ = command.__doc__
    return told


# ---- %residency


def _residency(shell: Any, line: str) -> Any:
    """%residency [MODEL [OPTIMIZER ...]]: where every tensor is now, and what is wrong with it.

    Without a model: every FSDP2 model that a variable holds.
    """
    from diagkit.capture import start

    models, optimizers = _watched(shell, line)
    recorder = start(models, optimizers, out=None, detail="phases")
    recorder.close()
    return _together(recorder.lines)


def _together(lines: list[bytes]) -> Any:
    """What all ranks show, on rank 0; None on a rank whose part is shown there."""
    from diagkit.capture.meeting import gathered
    from diagkit.trace import Trace
    from diagkit.trace.reader import read_rank

    found = gathered(b"".join(lines))
    if found is None:
        return None
    ranks = {rank: read_rank(part.splitlines(keepends=True)) for rank, part in found.items()}
    from diagkit.views.ranks import RanksView

    return RanksView(Trace(ranks))


def _watched(shell: Any, line: str) -> tuple[Mapping[str, Any], list[Any]]:
    """The models, by their variables' names, and the optimizers that the line names."""
    from torch import nn

    models: dict[str, Any] = {}
    optimizers: list[Any] = []
    for word in shlex.split(line):
        thing = _value(shell, word)
        if isinstance(thing, nn.Module):
            models[word] = thing
        elif hasattr(thing, "param_groups"):
            optimizers.append(thing)
        else:
            from diagkit.capture.parts import models_of, optimizers_of

            models.update(models_of(thing))
            optimizers += optimizers_of(thing)
    if not models:
        models = _found(shell, nn.Module)
    if not models:
        raise UsageError("no model to look at", found=line or "no FSDP2 model in any variable", remedy="Name a model")
    if not optimizers:
        named = [value for name, value in shell.user_ns.items() if not name.startswith("_")]
        optimizers = [value for value in named if hasattr(value, "param_groups") and hasattr(value, "state")]
    return models, optimizers


def _value(shell: Any, word: str) -> Any:
    try:
        return shell.ev(word)
    except Exception as error:
        raise UsageError("no such variable", found=word, where=f"{type(error).__name__}: {error}") from None


def _found(shell: Any, module: Any) -> dict[str, Any]:
    from diagkit import torch_internals
    from diagkit.capture.parts import outermost

    held = {name: value for name, value in shell.user_ns.items() if isinstance(value, module) and name[0] != "_"}
    return outermost({name: value for name, value in held.items() if torch_internals.has_fsdp(value)})


# ---- %%record


def _record(shell: Any, line: str, cell: str) -> Any:
    """%%record NAME [MODEL [OPTIMIZER ...]]: runs the cell as a phase and shows what it moved.

    The trace of all ranks is afterwards in the variable trace_NAME, on rank 0.
    """
    from diagkit.capture import start

    name, _, rest = line.strip().partition(" ")
    if not name.isidentifier():
        raise UsageError("the phase needs a name", found=line or "nothing", expected="%%record NAME [MODEL ...]")
    models, optimizers = _watched(shell, rest)
    recorder = start(models, optimizers, out=None)
    try:
        with recorder.phase(name):
            return _run(shell, cell)
    finally:
        recorder.close()
        view = _together(recorder.lines)
        if view is not None:
            shell.user_ns[f"trace_{name}"] = view.trace
            _display(view)


def _run(shell: Any, cell: str) -> Any:
    """Runs a cell's code in the user's name space; the value of a last expression, as the cell itself would show it."""
    code = shell.transform_cell(cell)
    file = shell.compile.cache(code, shell.execution_count)
    tree = ast.parse(code, filename=file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    if cell.rstrip().endswith(";") and last is not None:
        tree.body.append(last)
        last = None
    exec(compile(tree, file, "exec"), shell.user_global_ns, shell.user_ns)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), file, "eval"), shell.user_global_ns, shell.user_ns)


def _display(thing: object) -> None:
    import IPython.display

    show: Callable[[object], None] = IPython.display.display
    show(thing)


# ---- %explain


def _explain(shell: Any, line: str) -> Any:
    """%explain: what the last exception means, on every rank that has one."""
    from diagkit.live import explain

    last = getattr(shell, "last_execution_result", None)
    error = None if last is None else (last.error_in_exec or last.error_before_exec)
    try:
        text = repr(explain(error))
    except UsageError:
        text = ""
    return _texts(text)


# ---- %guard


def _guard(shell: Any, line: str) -> Any:
    """%guard MODEL [raise|warn|skip]: stops manual moves of the model from here on, on every rank that runs it.

    %guard: what was stopped so far. %guard off: no more.
    """
    words = shlex.split(line)
    if words == ["off"]:
        _leave_guards()
        return None
    if not words and _GUARDS:
        return _texts("\n".join(map(repr, _GUARDS)))
    if not words or len(words) > 2:
        raise UsageError("what is to be guarded?", expected="%guard MODEL [raise|warn|skip], or %guard off")
    from diagkit.remedy import guard

    _GUARDS.append(guard(_value(shell, words[0]), *words[1:]))
    return _texts(repr(_GUARDS[-1]))


def _leave_guards() -> None:
    while _GUARDS:
        _GUARDS.pop().close()


# ---- %heal


def _heal(shell: Any, line: str) -> Any:
    """%heal [--dry-run] [--buffers] [--alone] [MODEL [OPTIMIZER ...]]: mends what a move or an exception has done.

    Without a model: every FSDP2 model that a variable holds. On the ranks of a job all run it together.
    """
    from diagkit.remedy import heal

    words = shlex.split(line)
    options = {option: option in words for option in ("--dry-run", "--buffers", "--alone")}
    models, optimizers = _watched(shell, shlex.join(word for word in words if word not in options))
    healing = heal(models, optimizers, **{name[2:].replace("-", "_"): on for name, on in options.items()})
    return _texts(repr(healing), alone=healing)


def _texts(text: str, alone: object = None) -> Any:
    """What every rank has to say, on rank 0; of a single rank the thing itself, if there is one."""
    from diagkit import torch_internals
    from diagkit.capture.meeting import gathered
    from diagkit.views.ranks import TextOfRanks

    world = torch_internals.rank_and_world()[1]
    if world == 1 and alone is not None:
        return alone
    found = gathered(text.encode())
    return None if found is None else TextOfRanks({r: part.decode() for r, part in found.items()}, world)


_LINES: dict[str, Callable[..., Any]] = {
    "residency": _residency,
    "explain": _explain,
    "guard": _guard,
    "heal": _heal,
}

__all__ = ["load", "unload"]
