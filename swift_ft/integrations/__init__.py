"""Other people's trainers as they are, each driven so that an interrupted step can be repeated."""
