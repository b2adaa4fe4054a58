"""Measures what each operation really does in each state: the tables that `diagkit.diagnosis.predictions` ships and looks up.

``python -m diagkit.demo.predictions --out FILE`` measures the installed torch on the simulated accelerator.
"""
