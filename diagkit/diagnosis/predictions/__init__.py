"""What each next operation will do in a given state: tables measured on real FSDP2, looked up by facts."""

from diagkit.diagnosis.predictions.lookup import consequences, predict

__all__ = ["consequences", "predict"]
