"""ZeRO: which rank steps which elements, and what a rank holds of weights, gradients and states.

The user's optimizer stays: its parameters are replaced during the step by this rank's slices of flat buckets.
``parameter.grad`` then holds a placeholder that raises when it is read, and that can be cleared in all the usual ways.

    zero_optimizer.py    stages 1 and 2: slices, reduce-scatter, masters
    sliced_optimizer.py  puts the slices in the place of the optimizer's parameters
    segments.py          the segment of a bucket that a rank steps, on the device or on the host
    zero3_layers.py      stage 3: weights are gathered while a layer runs
    units.py             stage 3: what is gathered together
    flat_parameters.py   stage 3: flat tensors of parameters, those of float8 layers included
"""
