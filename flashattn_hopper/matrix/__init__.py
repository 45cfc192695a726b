"""The correctness matrix: every kernel of the catalog on every arch, run where it can run, else compiled and read."""
