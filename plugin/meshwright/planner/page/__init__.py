"""The answer of a search as one HTML page of diagrams and tables."""

from meshwright.planner.page.page import Answer, page, write_page

__all__ = ["Answer", "page", "write_page"]
