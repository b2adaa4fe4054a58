"""What a run leaves behind: schema, a writer that loses at most its last line, a reader that survives what it finds."""

from diagkit.trace.merged import Trace, open_trace
from diagkit.trace.reader import RankTrace, Transition, read_rank

__all__ = ["RankTrace", "Trace", "Transition", "open_trace", "read_rank"]
