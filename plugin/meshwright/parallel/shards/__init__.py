"""Parameters and tensors of which a rank holds a part: what stands for them, and who may read them.

A part cannot be read as the whole: what a rank has in part, or not at all, is a ``StandIn``, and an operation that
would read it as the whole raises an error that names the function to call. While the parameter's own modules or
optimizer use it, it has its plain class, so torch chooses the same kernels and forward has no overhead. Elsewhere its
shape is that of the whole parameter; code that handles parts asks for ``own_shape``.

    stand_in.py           StandIn and its errors; stand-ins for sharded logits and for gradients held elsewhere
    sharded_parameter.py  ShardedParameter and LocalGradient, on which elementwise arithmetic is exact
    partial_gradients.py  partial gradients, the addends that ranks of tp compute; the window in which a parameter is
                          plain: while its module runs or its optimizer steps
    added_parameters.py   errors for parameters that the program adds later
    state_of_parts.py     what a program may read of an optimizer's state between steps
"""
