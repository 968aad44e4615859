"""The detection of machines, workers and stores that are gone."""
