"""A batch: what its arguments hold, which share a rank has, and where its rows or documents must stay apart.

what argument has rows, and where       schema.py
packed documents stay apart             document_rows.py finds the borders, and makes rows of documents in mixers;
                                        flash_rows.py gives them to flash kernels; ``context/masks.py`` under cp;
                                        elsewhere the model's own mask does
the mean over the global batch          mean_over_ranks.py; loss_gradients.py compares its gradients over dp
images, videos, sounds of a row         items.py
modules that mix rows (BatchNorm)       mixed_rows.py
dynamic rotary embeddings               longest_position.py
what a loader has cut                   share.py
"""
