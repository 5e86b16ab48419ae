"""A reader for each kind of dataset; ``choose.py`` picks one.

base.py           the position that every reader keeps
map_style.py      a rank's rows of a map-style dataset
stream_shards.py  an iterable dataset with shards, in lanes     read_ahead.py  the buffer of samples of lanes
whole_stream.py   a dataset that can only be iterated: each rank reads all of it
split.py          a dataset that the user has split
"""
