"""The planner: finds a parallel plan before anything runs, from shapes and hardware. It needs no torch and no GPU."""
