"""What --output-dir keeps of samples."""

from miles.config.tracking import TrackingArguments


def test_the_samples_of_the_report_have_the_values_of_their_tokens_unless_a_flag_says_how_many():
    assert TrackingArguments(report_samples=3).token_values == 3
    assert TrackingArguments(report_samples=3, samples_token_values=-1).token_values == -1


def test_the_bound_of_the_file_is_in_megabytes():
    assert TrackingArguments(samples_max_mb=0.5).samples_max_bytes == 500_000
    assert TrackingArguments(metrics_max_mb=1.5).metrics_max_bytes == 1_500_000
