"""The control flow of a rank that follows: it loads what rank 0 loads, and takes its steps."""

import logging

from treadle_trainer import training
from treadle_trainer.ports import Backend, LoadOrder, Orders, PayloadReader, StepOrder
from treadle_trainer.publisher import parameters_digest
from treadle_trainer.recipe import Recipe
from treadle_trainer.training import BatchFaultyError

log = logging.getLogger(__name__)


def follow(recipe: Recipe, orders: Orders, payloads: PayloadReader) -> None:
    """Carries out orders to the last; blocks.

    Raises RanksLostError, or what rank 0 raises too, where no step can be taken any more.
    """
    backend: Backend | None = None
    while (order := orders.next()) is not None:
        match order:
            case LoadOrder():
                backend = recipe.build_backend(order.folder)
                if order.optimizer:
                    backend.restore_optimizer(order.folder)
                orders.loaded(order, parameters_digest(backend.parameters()))
            case StepOrder() if backend is not None:
                _take(order, recipe, backend, orders, payloads)
            case _:
                raise RuntimeError("a step before anything was loaded")


def _take(
    order: StepOrder, recipe: Recipe, backend: Backend, orders: Orders, payloads: PayloadReader
) -> None:
    try:
        training.train(
            order.claim,
            step=order.step,
            recipe=recipe,
            backend=backend,
            payloads=payloads,
            ranks=orders.ranks,
        )
    except BatchFaultyError as error:
        log.info("step %d: %s", order.step, error.message)  # rank 0 hands it back
