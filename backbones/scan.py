"""The orders in which a scan may visit the tokens of an image: see ``scanvas.kernels.scan_order``."""

from scanvas.kernels.scan_order import ORDERS, check_order, from_order, ordered_grid, permutation, to_order

__all__ = ["ORDERS", "check_order", "from_order", "ordered_grid", "permutation", "to_order"]
