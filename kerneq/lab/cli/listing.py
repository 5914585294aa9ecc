"""The commands that say what there is: data sets, models, and the claims of the papers, checked."""

import sys

from ..console import complain, progress_bars, say, show_table
from .arguments import AsJson


def data() -> None:
    """List the data sets: which are found under KERNEQ_DATA, which are missing and how to get them."""
    from ..data import data_root, describe
    from ..tables import data_table

    show_table(data_table(describe(), data_root()))


def verify(as_json: AsJson = False) -> None:
    """Check every claim of the papers and of ours by numbers, in half a minute; fails where an error is not known."""
    from ..run.files import to_json
    from ..tables import claims_table, describe_verdicts
    from ..verify.claims import CLAIMS
    from ..verify.search import check_claims

    with progress_bars() as progress:
        findings = list(progress.track(check_claims(CLAIMS), total=len(CLAIMS), description="claims"))
    if as_json:
        print(to_json([finding.row() for finding in findings], indent=2))
    else:
        show_table(claims_table(findings))
        say(describe_verdicts(findings))
    unexplained = [finding for finding in findings if not finding.explained]
    for finding in unexplained:
        words = f"{finding.published}, {finding.claim}: {finding.verdict.value}, {finding.worst}"
        complain(f"{words}. This is not explained.")
    if unexplained:
        sys.exit(1)


def models() -> None:
    """List the models: parameters, equation, paper, published accuracy and ours."""
    from ..tables import describe_models, models_table

    show_table(models_table())
    for sentence in describe_models():
        say(sentence)
