"""The time of a step, part by part.

layer.py      a layer's compute and collectives
simulate.py   the stages of a pipeline, operation by operation: the bubble
step.py       the whole step
"""
