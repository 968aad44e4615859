"""The training of `examples/train_swift.py` in a script that begins with more than torch."""

import datasets  # noqa: F401  (it takes its time)
import train_swift
import transformers.trainer  # noqa: F401  (as above)

if __name__ == "__main__":
    train_swift.main()
