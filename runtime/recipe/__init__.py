"""The training function of a job file with ``[model]``: a Hugging Face model, its data and its optimizer."""

from runtime.recipe.building import build

__all__ = ["build"]
