"""What a forward draws at random, as one device draws it.

Each rank draws the tensor that one device would draw, from torch's own generators in the program's order, and keeps its
part. A program that draws nothing runs nothing of it. What one device would draw follows from a twin of the module with
whole weights, which runs without values at the first draw. Each micro-batch begins from the states at the start of the
pass. A draw belongs to the innermost pass on its own stack, so those of other threads, of a model that calls itself,
and those after an interrupted pass do not count for another. Recomputation finds the part of a draw by the state before
it. A batch of sound of a new length needs no further pass without values where a rank has all of each row.

Some draws cannot be placed: a shape that depends on values or whose order of rows no view shows, a kernel that draws
inside, ranks with different states or numbers of rows (compared in the first 3 steps and every 50). One line says so,
and from the next pass on the ranks draw streams of their own (``parallel/dropout_streams.py``). A line also tells of
draws by numpy and by Python's random module, which have the values of a rank's rows alone.

    device_draws.py  draws and keeps the part    part.py          which part a rank keeps
    sites.py         the shape of each draw      kernels.py       the operations of torch that draw
    row_order.py     rows and tokens in a dim    drawing_time.py  what it takes
"""
