"""Every item of the matrix: what real training loops do. Each module puts its own into `ITEMS`."""

import items_data
import items_models
import items_optimizers
import items_shapes
import items_steps
import items_variables
from kit_loops import ITEMS

__all__ = ["ITEMS", "items_data", "items_models", "items_optimizers", "items_shapes", "items_steps", "items_variables"]
