"""The answer of a search as one HTML page of diagrams and tables."""

from meshwright.planner.page.page import page, write_page

__all__ = ["page", "write_page"]
