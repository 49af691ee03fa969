"""A real job on one host, for `fabric rl bench` and the tests: trainers with FSDP2 x TP, inference ranks."""
