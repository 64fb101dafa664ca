"""All items of the matrix: kinds of real training loops. Each module adds its items to `ITEMS`."""

import items_data
import items_models
import items_optimizers
import items_shapes
import items_steps
import items_variables
from kit_loops import ITEMS

__all__ = ["ITEMS", "items_data", "items_models", "items_optimizers", "items_shapes", "items_steps", "items_variables"]
