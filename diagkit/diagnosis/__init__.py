"""Diagnosis: from fact records to findings. Needs neither torch nor a running job."""

from diagkit.diagnosis.diagnose import diagnose
from diagkit.diagnosis.finding import Consequence, Finding, Findings
from diagkit.diagnosis.rule import SEVERITIES, Rule, all_rules, find_rules

__all__ = ["SEVERITIES", "Consequence", "Finding", "Findings", "Rule", "all_rules", "diagnose", "find_rules"]
