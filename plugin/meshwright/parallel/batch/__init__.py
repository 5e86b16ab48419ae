"""A batch: what its arguments hold, which share a rank has, and where its rows or documents must stay apart."""
