"""Pipeline parallelism: which stage runs what when, and which layers a stage holds."""
