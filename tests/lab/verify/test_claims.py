"""`kerneq verify`: every claim fares as is known, and a claim that does not is noticed."""

import json
import math

import pytest
import torch

from kerneq.lab.verify import claims
from kerneq.lab.verify.search import Verdict, WorstCase, ascend, check_claims, find_largest, read_statement

# Bounds that are attained: a search that does not come near them would not notice a wrong one, either.
ATTAINED = {
    "perturbed fixed points": 0.8,
    "Lipschitz constant of GEQ": 0.97,
    "Lipschitz constant of OptEq": 0.999,
    "similarity of OptEq's outputs": 0.99,
    "the map is L-Lipschitz for every γ": 0.999,
    "E is strongly convex for L < ½e^{3/2}": 0.999,
    "‖z*‖ ≤ √β‖a‖/2 and ‖r*‖ ≤ ‖a‖": 0.99,
}


@pytest.mark.parametrize("claim", claims.CLAIMS, ids=lambda claim: "{1}: {0}".format(*read_statement(claim)))
def test_every_claim_fares_as_is_known(claim):
    [finding] = check_claims([claim])
    found = finding.evidence
    assert finding.explained, (finding.verdict, found)
    assert (found.published if found.corrected is None else found.corrected) >= ATTAINED.get(finding.claim, 0.0)


def test_verdicts():
    assert set(ATTAINED) <= {read_statement(claim)[0] for claim in claims.CLAIMS}
    assert WorstCase(1.0, "").verdict is Verdict.HOLDS
    assert WorstCase(1.1, "", 0.9).verdict is Verdict.CORRECTED
    assert WorstCase(-1.0, "", 0.9).verdict is Verdict.CORRECTED  # a negative bound bounds nothing
    failures = (WorstCase(1.1, ""), WorstCase(1.1, "", 1.1), WorstCase(math.nan, ""))
    assert all(case.verdict is Verdict.FAILS for case in failures)


def test_an_ascent_finds_the_top_and_does_not_count_what_is_not_finite(float64):
    def hill(x):  # the top, 2, is at x = 1; to the right of 3 there is nothing
        return torch.where(x > 3, torch.nan, 2 / (1 + (x - 1) ** 2))

    assert ascend(hill, torch.linspace(-2, 4, 7), steps=200) == pytest.approx(2.0)
    assert math.isnan(ascend(hill, torch.full((3,), 4.0)))
    assert find_largest(0.0, 2.0, 1.0) == 2.0 and math.isnan(find_largest(0.0, math.nan, 1.0))


KNOWN = "b: a. Erratum: c."
CASES = {
    "a known error": (KNOWN, WorstCase(2.0, "there", 0.5), 0),
    "an unknown error": ("b: a.", WorstCase(2.0, "there", 0.5), 1),
    "an error that is gone": (KNOWN, WorstCase(0.5, "there", 0.5), 1),
    "a correction that fails": (KNOWN, WorstCase(math.inf, "there", 2.0), 1),
}


@pytest.mark.parametrize("words, case, code", CASES.values(), ids=CASES)
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
def test_the_command_fails_where_an_error_is_not_explained(words, case, code, options, monkeypatch, kerneq):
    def claim():
        return case

    claim.__doc__ = words
    monkeypatch.setattr(claims, "CLAIMS", (claim,))
    before = torch.get_default_dtype()
    ended, out, err = kerneq("verify", *options)
    assert ended == code and torch.get_default_dtype() == before
    assert ("not explained" in err) == (code == 1)
    if options:
        [row] = json.loads(out)
        assert row["worst_case"] == "there" and row["explained"] == (code == 0)
    else:
        assert "b: a" in out and "there" in out
