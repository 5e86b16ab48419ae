"""What a plan adds to a model, part by part; ``distribute/installation.py`` has their order.

decision.py   Decision: what a plan does to one model; Build: a decision with the objects that carry it out;
              Refusal: a row by which a call is refused
passes.py     what watches each pass, the hooks of blocks and experts, ``generate``
splits.py     tokens over cp, documents, images of towers, micro-batches and stages
training.py   the optimizer's parts, gradients, the loss, recomputation, deferred logits, compiled layers
"""
