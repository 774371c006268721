"""Train a language model by reinforcement learning: ``python train.py --flags…`` (``--help`` lists them)."""

import sys

from miles.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
