"""Context parallelism: each rank of cp holds a part of every sequence, attention included."""
