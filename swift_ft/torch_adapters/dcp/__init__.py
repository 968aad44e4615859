"""Parts of checkpoints in the format of torch's DCP, written and read by one worker."""
