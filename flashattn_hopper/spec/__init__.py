"""The vocabulary: what is asked, which keys are seen, how work is cut, what a kernel can do. Standard library only."""
