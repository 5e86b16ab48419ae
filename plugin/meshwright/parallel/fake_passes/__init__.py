"""Passes without values, and the sizes that they show of a model.

One pass for each length of rows has all watchers: the order of the layers, the routers of a load-balancing loss, and
what layers and attentions are given. What they see is kept for one call alone: a pass also depends on code of libraries
that a program may replace between two calls, which no key of the model can hold whole.

    observe.py         one pass, all watchers            fake_pass.py       runs a forward on tensors without values
    sources.py         what follows from which weights   known_values.py    values of small tensors in such a pass
    measured_shape.py  the memory of layers, measured    routed_shape.py    sizes of experts, mixers and towers
    example_images.py  images for such a pass
"""
