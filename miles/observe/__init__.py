"""The output of a run: metrics, samples, profiles, the files of a run, its page, comparisons."""
