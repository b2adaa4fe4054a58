"""Runs verl's own engines on the simulated accelerator, one operation in each process, and writes down what happened.

Imported in two places: by the tests (cells, launch; standard library only) and in verl's environment (observe,
build, driver). Facts are read here from scratch, not through diagkit's recorder: the comparison is worth more when
the two share no reader.
"""
