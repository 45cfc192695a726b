"""The training job of `make run`: a byte-level GPT on real text, through hopper_attention."""
