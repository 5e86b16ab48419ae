"""The answer of a search as one HTML page: pictures first, words where a picture cannot say it."""

from meshwright.planner.page.page import page, write_page

__all__ = ["page", "write_page"]
