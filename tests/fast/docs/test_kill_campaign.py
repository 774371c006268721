"""docs/reliability.md has the tables of all trials of the kill campaign, and their number."""

import json

from tests.fast.cluster.runs.launches import REPO
from tests.kill_campaign.campaign import tables

RESULTS = REPO / "tests" / "kill_campaign" / "results.jsonl"


def test_the_page_has_the_tables_of_all_trials():
    results = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    page = (REPO / "docs" / "reliability.md").read_text()
    assert tables(results) in page, "paste what tests/kill_campaign/campaign.py --results … --table prints"
    assert f"It has {len(results):,} trials so far" in " ".join(page.split())
