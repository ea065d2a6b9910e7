"""The training function of a job file with ``[model]``: a Hugging Face model, its data and its optimizer."""

from typing import Any

import msgspec

from runtime.errors import TrainingError
from runtime.recipe.datasets import make_data, open_tokenizer
from runtime.recipe.models import load_model
from runtime.recipe.optimization import make_optimizer, make_scheduler
from runtime.sources.errors import DataError
from runtime.sources.used_files import check_files
from runtime.training import Training
from runtime.wire.recipe import Recipe

__all__ = ["build"]


def build(**tables: Any) -> Training:
    """Make what a job file with ``[model]`` trains.

    :param tables: tables of the file, as plain data (``runtime.wire.recipe.Recipe``).
    :raises TrainingError: the model, the data or their combination cannot be trained; the message says
        why.
    """
    try:
        recipe = msgspec.convert(tables, Recipe)
    except msgspec.ValidationError as error:
        raise TrainingError(
            f"the job's tables cannot be read: {error}; submit it with this version"
        ) from error
    try:
        check_files(recipe, recipe.files)
        tokenizer = open_tokenizer(recipe.data)
        model = load_model(recipe.model, tokenizer)
        data = make_data(recipe, model, tokenizer)
    except DataError as error:
        raise TrainingError(str(error)) from error
    return Training(
        model=model,
        dataset=data.training,
        collate=data.collate,
        optimizer=make_optimizer(recipe.optimizer),
        scheduler=make_scheduler(recipe.schedule, recipe.steps),
        evaluation=data.held_out,
        files_from=[] if tokenizer is None else [tokenizer.directory],
    )
