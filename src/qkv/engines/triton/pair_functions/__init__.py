"""Functions of a pair's positions, translated to Triton: `score_mod`, `mask_mod` and mask rules."""
