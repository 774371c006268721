"""What a run shows: metrics, samples, profiles, the files of a run, its page, comparisons."""
