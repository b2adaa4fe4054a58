"""What each next operation will do in a given state: tables measured on real FSDP2, looked up by facts."""

from diagkit.diagnosis.predictions.facets import Facets, facets
from diagkit.diagnosis.predictions.lookup import Prediction, consequences, predict
from diagkit.diagnosis.predictions.probe import measure

__all__ = ["Facets", "Prediction", "consequences", "facets", "measure", "predict"]
