"""The answer of a search as one HTML page of diagrams and tables.

page.py     the page     listing.py  the plans that it shows     settings.py  plans at other settings of its sliders
render.py   templates and SVG shapes                             data.py      what its JavaScript draws
"""

from meshwright_tools.plan_page.page import Answer, page, write_page

__all__ = ["Answer", "page", "write_page"]
