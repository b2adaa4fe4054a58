"""What a guard's own exception means: nothing is broken, because a move was stopped before it did its harm.

Its text is diagkit's own (`diagkit.remedy.moves`), so that it can be read here where only a log or a trace is left.
"""

from __future__ import annotations

import re

from diagkit.language import tr
from diagkit.trace.schema import Failure

__all__ = ["told"]

_CODE = re.compile(r"\((DK\d{3})[a-z]?\)")
_LINE = re.compile(r"\(at (.{1,300}?)\)\.(?!\S)", re.DOTALL)  # a cell is told by its code, which has parentheses too


def told(failure: Failure) -> tuple[str, str] | None:
    """The code of the hazard that did not come about, and a sentence with the line to delete; None for other failures.

    >>> told(Failure("MoveBlocked", "a move splits it (DK101): found Module.to (at engine.py:12 save). Leave it.", ""))
    ('DK101', 'dk.guard stopped DK101 before it happened: delete the move at engine.py:12 save.')
    >>> told(Failure("MoveBlocked", "it splits (DK101) (at notebook, line 3: model.to(device)). Leave it.", ""))[1]
    'dk.guard stopped DK101 before it happened: delete the move at notebook, line 3: model.to(device).'
    """
    code = _CODE.search(failure.message) if failure.type == "MoveBlocked" else None
    if code is None:
        return None
    line = _LINE.search(failure.message)
    if line is None:
        return code[1], tr("dk.guard stopped {code} before it happened: delete the move.", code=code[1])
    sentence = tr("dk.guard stopped {code} before it happened: delete the move at {line}.", code=code[1], line=line[1])
    return code[1], sentence
