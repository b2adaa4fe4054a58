"""Experiments with both engines on real ranks, and what came out, beside what had to come out.

Above the lab and the recorder: `experiments.py` names the cells of the published table and `scenario.py` whatever else
somebody wants to know; `launch.py` runs both from a warm process, `cell.py` and `life.py` are what one rank does,
`evidence.py` reads its trace. `expected.py` holds the field's measured outcomes, `forecast.py` works others out on
paper, `exercises.py` sets tasks. `solo.py` makes a notebook's own kernel a rank, `stepping.py` follows a function
statement by statement.
"""
