"""Measures what each operation really does in each state, for the tables that `diagkit.diagnosis.predictions` ships.

``python -m diagkit.demo.predictions --out FILE`` measures the installed torch on the simulated accelerator.
"""
