"""One node: carries out orders, reports its workers, finds hung ones."""
