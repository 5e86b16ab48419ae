"""Context parallelism: each rank of cp holds a part of every sequence, attention included.

What the stock code computes before the first layer is computed for the whole row: positions, rotary embeddings, masks,
and which documents are packed. Only the layers, the head and the loss see a part, so no value depends on how many
tokens a rank has. The price is that the embedding's result is whole, and in memory until the forward pass ends. Our
attention function is registered with transformers under a name of its own, and masks stay functions. A mixer hands its
state from chunk to chunk if its kind is known to be linear in it; otherwise it gathers the tokens in order and keeps
its own.

    region.py         cuts tokens at the first layer, joins them after the last
    attention.py      the attention function in place of the model's own; ulysses: heads for tokens
    ring.py           ring attention                 key_exchange.py   gathers keys, or sends them round
    attend.py         blocks of attention            flash.py          flash kernels and packages
    masks.py          masks as functions, documents  handed_states.py  recurrences over the ranks
    record.py         what layers and attentions are given, and layers that mix tokens elsewhere
    recorded_pass.py  the pass that sees it          check_method.py   whether a method computes this attention
    token_trial.py    tries what the program brought
    ../parallel/sequence_parts.py                    which tokens each rank gets
"""
