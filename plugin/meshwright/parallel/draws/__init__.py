"""What a forward draws at random, as one device draws it.

Each rank draws the tensor that one device would draw, from torch's own generators in the program's order, and keeps its
part. A program that draws nothing runs nothing of it. What one device would draw follows from a twin of the module with
whole weights, which runs without values at the first draw. Each micro-batch begins from the states at the start of the
pass. A draw belongs to the innermost pass on its own stack, so those of other threads, of a model that calls itself,
and those after an interrupted pass do not count for another. Recomputation finds the part of a draw by the state before
it. A batch of sound of a new length needs no further pass without values where a rank has all of each row. A rank of cp
keeps its tokens, and each block of attention its queries and keys.

What cannot be placed (a shape that depends on values, or that has several entries for each row in an order that is not
known, a kernel that draws inside, ranks with different states or numbers of rows, which are compared in the first 3
steps and every 50) is logged once, and from the next pass on the ranks draw streams of their own
(``parallel/dropout_streams.py``). They begin the next pass from one state, whatever each has drawn. A line also tells
of draws by numpy and by Python's random module, which have the values of a rank's rows alone.

The stages of a pipeline hand on the generators' states. The first micro-batch carries them from stage to stage, and the
last stage tells all ranks how the pass has ended: 5 kB for each, between hosts. The other way, in which a stage draws
what earlier stages draw and throws it away, needs no message, but it would make each rank draw for all layers, needs
the shapes of all draws, and fails where what is drawn depends on values. The first pass of each kind (training or not,
which arguments) shows whether any stage draws; if none does, and no rate of dropout is set, later passes carry nothing.
With the states travel two marks, by which all stages stop in the same pass if one of them cannot place a draw.

    passes.py        passes, draws, their time   part.py          which part a rank keeps
    device_draws.py  what a model's passes draw  kernels.py       the operations of torch that draw
    sites.py         the shape of each draw      row_order.py     the order of rows in a dim
    stage_states.py  from stage to stage         score_blocks.py  blocks of attention, of one draw
    sampling.py      the tokens of generate
"""
