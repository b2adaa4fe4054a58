"""The script in a report really brings about, on the simulated accelerator, the hazard that it is said to show."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest
from traces import engine_trace

from diagkit.diagnosis import Finding, Findings, find_rules
from diagkit.torch_internals import torch_version
from diagkit.trace import open_trace
from diagkit.views.report.reproduce import RECIPES, script

# What torch says on the last line of the script's traceback; "" for what goes wrong without a word.
SAID = {
    "DK101": "Attempted to set the storage of a tensor",
    "DK102": "Attempted to set the storage of a tensor",
    "DK103a": "should be materialized on CPU",
    "DK103b": "attempting to assign a gradient with device type",
    "DK104": "on meta device",
    "DK105": "attempting to assign a gradient with dtype",
    "DK201": "",
    "DK202": "",
    "DK301": "Expected all tensors to be on the same device",
    "DK302": "Expected all tensors to be on the same device",
    "DK501": "Expected all tensors to be on the same device",
    "DK601": "'FSDPParam' object has no attribute 'param_dtype'",
    "DK604": "" if torch_version() >= (2, 11) else "got mixed torch.Tensor and DTensor",
}
# What the script prints at its end where nothing raises.
LEFT = {
    "DK201": re.compile(r"losses, which should fall: \[([\d.]+), \1, \1\]"),
    "DK202": re.compile(r"losses, which should fall: \[([\d.]+), \1, \1\]"),
    "DK604": re.compile(r"gradients: \[None, None, None"),
}


def source(code: str) -> str:
    (rule,) = find_rules(code)
    finding = Finding(rule, rule.severity, ("w",), "", (0,), 1, "save", 0, ())
    found, text = script(Findings([finding]), engine_trace())
    assert found == code
    return text


def test_every_recipe_is_tried() -> None:
    assert SAID.keys() == RECIPES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("code", SAID)
def test_the_script_shows_the_hazard(code: str, tmp_path: pathlib.Path, compiler: str) -> None:
    path = tmp_path / "reproduce.py"
    path.write_text(source(code))
    command = [sys.executable, "-m", "diagkit", "run", "--simulate", "--out", tmp_path / "trace", path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == (1 if SAID[code] else 0), done.stderr
    assert SAID[code] in done.stderr
    assert "before: 0.inner.weight: metadata" in done.stdout and "after: 0.inner.weight: metadata" in done.stdout
    if not SAID[code]:
        assert LEFT[code].search(done.stdout)
    assert code in open_trace(tmp_path / "trace").findings().codes


def test_a_run_without_trouble_and_one_of_somebody_elses_have_no_script() -> None:
    assert script(Findings([]), engine_trace()) == ("", "")
    (rule,) = find_rules("DK901")
    assert script(Findings([Finding(rule, "later", ("w",), "", (0,), 1, "", 0, ())]), engine_trace()) == ("", "")
