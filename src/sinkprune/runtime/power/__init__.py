"""Power sensors of a machine, joules of spans of time, and temperatures and clocks."""
