"""Experiments with both engines on real ranks, and what came out, beside what had to come out.

Above the lab and the recorder: `experiments.py` names the cells, `launch.py` runs them from a warm process,
`cell.py` is what one rank does, `evidence.py` reads its trace, `expected.py` holds the field's measured outcomes.
"""
