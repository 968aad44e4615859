"""A trainer like torchtitan's, small: what its loop does between machines, without its size."""
